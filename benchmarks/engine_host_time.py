"""CPU time of scheduler and loop per engine step: everything but the runner.

    python benchmarks/engine_host_time.py [--seqs 256] [--steps 400]

A runner that returns a token a sequence and takes no part in the measurement; sequences decode, finish, and others take their place.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.clocks import ReportedClock
from engine.graphs import StepPath
from engine.measure import spare_the_collector
from engine.messages import Step
from engine.run import Engine, build_loop
from engine.step import StepInput, StepOutput, StepTimes
from serving.clients import start_clients
from serving.scenario import from_mapping


class IdleRunner:
    """Answers at once; counts the time it takes itself, so that it can be left out."""

    def __init__(self) -> None:
        self.inside_s = 0.0

    def launch(self, batch: StepInput) -> StepInput:
        """Take the step."""
        return batch

    def collect(self, batch: StepInput) -> StepOutput:
        """One token for everybody who samples."""
        begin = time.thread_time()
        tokens = {sequence.request_id: (7,) for sequence in batch.sequences if sequence.sampled_rows}
        output = StepOutput(tokens, StepPath("eager", len(tokens), 0), StepTimes(0.0, 0.0, 0.0, 0.0, 0.02))
        self.inside_s += time.thread_time() - begin
        return output


class Watch:
    """Observes a loop: CPU seconds between the ends of steps, by whether anything but decodes happened."""

    def __init__(self, runner: IdleRunner, seqs: int) -> None:
        self.steady: list[float] = []
        self.changing: list[float] = []
        self._runner = runner
        self._seqs = seqs
        self._mark = time.thread_time()

    def submitted(self, request_id: int) -> None:
        """Not of interest."""

    aborted = submitted

    def planned(self, plan: object) -> None:
        """Not of interest."""

    def left(self, left: object) -> None:
        """Not of interest."""

    def stepped(self, step: Step) -> None:
        """Take the time since the step before."""
        now = time.thread_time()
        if step.plan.decodes >= 0.95 * self._seqs:
            (self.changing if step.plan.chunks or step.finished else self.steady).append(now - self._mark - self._runner.inside_s)
        self._runner.inside_s = 0.0
        self._mark = now


def main() -> None:
    """Run and print medians in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--gate-ms", type=float, default=None, help="exit with 1 when a median exceeds this")
    chosen = parser.parse_args()
    scenario = from_mapping({
        "version": 1, "name": "host", "seed": 1, "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm"},
        "kv_cache": {"block_tokens": 16, "blocks": 200 * chosen.seqs},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 2048, "max_batch_seqs": chosen.seqs}},
        "workload": {
            "requests": max(2 * chosen.seqs, chosen.steps * chosen.seqs // 200),
            "arrivals": {"process": "closed_loop", "users": chosen.seqs + 8},
            "prompt_tokens": {"dist": "uniform", "min": 200, "max": 800}, "output_tokens": {"dist": "uniform", "min": 50, "max": 350},
        },
    })  # fmt: skip
    runner = IdleRunner()
    watch = Watch(runner, chosen.seqs)
    loop = build_loop(scenario, Engine(runner, scenario.kv_cache.blocks, 4096, 1000, "idle"), ReportedClock(), observer=watch)
    start_clients(loop, scenario.workload, seed=1, block_tokens=16, max_model_len=4096, prefix_caching=True, slo=scenario.slo)
    with spare_the_collector():
        loop.run()
    worst = 0.0
    for label, values in (("decodes only", watch.steady), ("with chunks or finishes", watch.changing)):
        middle = statistics.median(values) * 1e3
        worst = max(worst, middle)
        print(f"{label:<26}{len(values):>6} steps of {chosen.seqs} sequences: median {middle:.3f} ms, p90 {statistics.quantiles(values, n=10)[-1] * 1e3:.3f} ms")
    if chosen.gate_ms is not None and worst > chosen.gate_ms:
        sys.exit(1)


if __name__ == "__main__":
    main()
