"""What drafts bring and cost on the real engine, by batch size, beside what the simulator says of the same scenario.

    python benchmarks/engine_drafts.py [--users 1 4 12] [--drafts 3] [--requests 36]

``engine-tiny`` on one CPU thread, on the normalised clock, as a closed loop: so many users, each with one request at a time. For each proposer: the
share of drafts accepted, the tokens of a decode and step, how much longer a step of decodes takes than one without drafts (the length from
which it pays), and the time per output token against the run without. The simulator is given the engine's acceptance, drafts that cost
what their layers do, and the fitted latency model of this network; it knows nothing of how texts repeat, so it drafts always.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.build import Choices, build_engine, normalised
from engine.measure import spare_the_collector
from engine.run import serve_scenario
from serving.records import Run, open_run
from serving.scenario import Scenario, load
from sim.run import simulate

PROPOSERS = {"prompt_lookup": ("{name: prompt_lookup}", 0.0), "layers": ("{name: layers, layers: 1}", 0.25)}  # with a draft's share of a plain step


class Figures(NamedTuple):
    """``step_ms`` is that of a step in which everybody decodes and nobody is read."""

    step_ms: float
    tpot_ms: float
    acceptance: float | None = None
    length: float | None = None


def scenario(users: int, requests: int, *overrides: str) -> Scenario:
    """The closed loop on a pool that never runs short."""
    return load("engine-tiny", [
        f"workload.arrivals={{process: closed_loop, users: {users}}}", f"workload.requests={requests}", "kv_cache.blocks=400",
        "workload.output_tokens={dist: constant, value: 48}", *overrides,
    ])  # fmt: skip


def speculation(proposer: str, drafts: int, acceptance: float) -> str:
    """An override."""
    name, share = PROPOSERS[proposer]
    return f"speculation={{policy: {{name: fixed, tokens: {drafts}}}, acceptance: {acceptance}, draft_step_fraction: {share}, proposer: {name}}}"


def measured(spec: Scenario, users: int) -> Figures:
    """Serve it on the engine."""
    engine, clock = normalised(build_engine(spec, Choices(device="cpu")), 0.005)
    with tempfile.TemporaryDirectory() as folder, spare_the_collector():
        summary = serve_scenario(spec, engine, clock, out=Path(folder) / "run").summary
        drafts = summary.get("speculation") or {}
        return Figures(_step_ms(open_run(Path(folder) / "run"), users), summary["tpot_s"]["mean"] * 1e3, drafts.get("acceptance"), drafts.get("acceptance_length"))


def _step_ms(run: Run, users: int) -> float:
    steps = run.steps
    return float(steps["duration_s"][(steps["decode_seqs"] == users) & (steps["prefill_tokens"] == 0)].mean() * 1e3)


def main() -> None:
    """Print a line a batch size and proposer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="*", default=[1, 4, 12])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=36)
    arguments = parser.parse_args()
    print(f"{'':<24}{'accepted':>9}{'tokens':>8}{'step cost':>10}{'sim':>6}{'TPOT ms':>9}{'plain':>7}{'ratio':>7}{'sim':>6}")
    for users in arguments.users:
        requests = max(8, min(arguments.requests, 6 * users))
        plain = measured(scenario(users, requests), users)
        said = simulate(scenario(users, requests)).summary["tpot_s"]["mean"]
        for proposer in PROPOSERS:
            real = measured(scenario(users, requests, speculation(proposer, arguments.drafts, 0.0)), users)
            summary = simulate(scenario(users, requests, speculation(proposer, arguments.drafts, real.acceptance))).summary
            print(
                f"{users:>3} users, {proposer:<14}{real.acceptance:>9.1%}{real.length:>8.2f}{real.step_ms / plain.step_ms:>10.2f}"
                f"{summary['speculation']['step_cost_ratio']:>6.2f}{real.tpot_ms:>9.2f}{plain.tpot_ms:>7.2f}{real.tpot_ms / plain.tpot_ms:>7.2f}"
                f"{summary['tpot_s']['mean'] / said:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
