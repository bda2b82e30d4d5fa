"""One prepared script for a machine with a GPU: are the kernels right, how fast are they, and does the simulator predict the engine?

    python -m engine.gpu_check [--device cuda|cpu] [--small] [--out DIR] [--seed N] [--only PART...] [--deadline-s S]

Under eight minutes on one H100 or H200; no network. Every part stands alone: one that fails is reported and the others go on, and what is
measured is on disk at once (``result.json`` below ``--out``). Exit code 1 when a part failed or a kernel is wrong. ``--small --device cpu``
runs the same code where there is no GPU, kernels in Triton's interpreter: a test of the script, not of any device. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

GPUS = {"H200": "h200-sxm", "H100": "h100-sxm", "A100": "a100-sxm-80gb"}  # part of a device's name -> its entry in the catalogue
DEADLINE_S = 440.0
SWEEP_S = 60.0


class Report:
    """What has been found so far, on disk after every part."""

    def __init__(self, out: Path, facts: dict[str, Any], deadline_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.failed: list[str] = []
        self._file = out / "result.json"
        self._found: dict[str, Any] = {"facts": facts, "seconds": {}}
        self._begin_s = time.monotonic()
        self._deadline_s = deadline_s

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """Run a part unless the time is up; returns what it found, or None."""
        begin_s = time.monotonic()
        if begin_s - self._begin_s > self._deadline_s:
            self._fail(name, "skipped: the time was up")
            return None
        say(f"-- {name}")
        try:
            found = run()
        except Exception as error:  # whatever a device does: the other parts are still worth having
            traceback.print_exc()
            self._fail(name, f"{type(error).__name__}: {error}")
            return None
        self._found["seconds"][name] = round(time.monotonic() - begin_s, 1)
        self._found[name] = found
        self._write()
        return found

    def _fail(self, name: str, reason: str) -> None:
        self.failed.append(name)
        self._found[name] = {"failed": reason}
        say(f"{name}: {reason}")
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")


def say(line: str) -> None:
    """Print at once: the run may be cut off."""
    print(line, flush=True)


def facts_of(device: Any, seed: int, small: bool) -> dict[str, Any]:
    """Device, versions, commit."""
    import torch
    import triton

    from engine.build import device_name
    from serving.version import commit

    return {
        "device": device_name(device, 1), "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
        "python": platform.python_version(), "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "seed": seed, "small": small,
    }  # fmt: skip


def run_kernels(report: Report, device: Any, seed: int, small: bool) -> None:
    """Correctness, then ceilings, then each kernel beside them."""
    import torch

    from engine.gpu import correctness, speed

    def correct() -> list[dict[str, Any]]:
        found = list(correctness.checks(device, seed, small=small))
        for one in found:
            say(f"{'ok   ' if one.passed else 'WRONG'} {one.kernel:<26}{one.error:9.1e} (limit {one.limit:.1e})  {one.shape}")
        if not all(one.passed for one in found):
            report.failed.append("correctness")
        return correctness.as_json(found)

    report.part("correctness", correct)
    sizes, repeats = (speed.SMALL, 2) if small else (speed.LARGE, 20)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ceiling = report.part("ceilings", lambda: speed.ceilings(device, sizes, dtype)._asdict())
    if ceiling is None:
        return
    ceiling = speed.Ceilings(**ceiling)
    say(f"copy {ceiling.copy_bytes_per_s / 1e12:.3f} TB/s (read and written), product {ceiling.matmul_flops_per_s / 1e12:.1f} TFLOP/s {dtype}")
    parts = {"decode_attention": speed.decode_rates, "prefill_attention": speed.prefill_rates, "pointwise": speed.pointwise_rates}
    for name, measure in parts.items():
        for row in report.part(name, lambda measure=measure: list(measure(device, sizes, dtype, ceiling, repeats))) or ():
            say("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    rows = report.part("decode_sweep", lambda: speed.sweep(device, sizes, dtype, ceiling, budget_s=2.0 if small else SWEEP_S, repeats=repeats))
    for row in (rows or ())[:8]:
        say("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))


def run_steps(report: Report, device: Any, seed: int, small: bool) -> None:
    """Whole decode steps, by graph and eagerly; then decodes and a prompt on two streams."""
    import torch

    from engine.architecture import from_llm, scaled_down
    from engine.gpu import overlap, speed, steps
    from engine.gpu.timing import copy_bytes_per_s
    from engine.loader import random_weights
    from serving.catalog import load_llm

    shape = from_llm(load_llm("llama-3.1-8b"))
    if small:
        shape = scaled_down(shape, layers=2, hidden=128, vocab=256, max_model_len=512)
    repeats = 3 if small else 30

    def weights() -> Any:
        return random_weights(shape, seed, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)

    def measure() -> list[dict[str, Any]]:
        cases = ((1, 32), (3, 32)) if small else ((1, 1024), (8, 1024), (64, 1024), (64, 4096), (64, 8192), (128, 1024))
        rate = copy_bytes_per_s(device, (speed.SMALL if small else speed.LARGE).copy_bytes)
        return list(steps.decode_steps(shape, weights(), cases, rate, repeats=repeats))

    for row in report.part("decode_steps", measure) or ():
        say(
            f"{row['path']:<6} batch {row['batch']:>4} context {row['context']:>6}: step {row['step_s'] * 1e3:8.3f} ms, device {row['device_s'] * 1e3:8.3f} ms, "
            f"roofline {row['floor_s'] * 1e3:8.3f} ms ({row['of_roofline']:.0%})"
        )
    steps.free_memory(device)
    cases = ((2, 32, 16),) if small else ((64, 1024, 512), (64, 4096, 512), (64, 1024, 2048), (128, 1024, 512))
    for row in report.part("two_streams", lambda: list(overlap.overlaps(shape, weights(), cases, repeats=repeats))) or ():
        say(
            f"{row['batch']:>4} decodes of {row['context']} {row['decodes_s'] * 1e3:8.3f} ms, prompt of {row['prompt']} {row['prompt_s'] * 1e3:8.3f} ms, in one batch "
            f"{row['together_s'] * 1e3:8.3f} ms, on two streams {row['beside_s'] * 1e3:8.3f} ms ({row['lost']:.0%} of the overlap lost)"
        )


def run_twin(report: Report, device: Any, small: bool, out: Path) -> None:
    """Profile, serve, calibrate, predict, compare."""
    from engine.build import Choices
    from engine.gpu import twin

    plan = twin.SMALL if small else twin.LARGE
    gpu = None
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
        gpu = next((entry for part, entry in GPUS.items() if part in name), None)
    if report.part("served", lambda: twin.measure_runs(plan, Choices(device=device.type), gpu, out)) is None:
        return
    judged = report.part("judged", lambda: twin.judge(plan, out))
    if judged is None:
        return
    for fit, runs in judged["compared"].items():
        for run, metrics in runs.items():
            errors = "  ".join(f"{metric} {metrics[metric][statistic]['error']:+.1%}" for metric, statistic in
                               (("tpot_s", "mean"), ("ttft_s", "p50"), ("ttft_s", "p99"), ("e2e_s", "mean"), ("output_tokens_per_s", "mean")))  # fmt: skip
            say(f"fit {fit:<20} {run:<24} {errors}")
    for run, found in judged["parity"].items():
        say(f"parity {run:<24} {found['differing_plans']} of {found['plans']} plans differ")


PARTS = ("kernels", "steps", "twin")


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check kernels, speed and prediction on one GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="sizes for a processor and the interpreter: a test of this script")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs; default: a fresh one, which is printed and recorded")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="begin no further part after so many seconds")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel's module is imported
    import torch

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("error: there is no CUDA GPU here (--small --device cpu tests the script without one)", file=sys.stderr)
        return 2
    device = torch.device(chosen.device, 0) if chosen.device == "cuda" else torch.device("cpu")
    seed = chosen.seed if chosen.seed is not None else secrets.randbelow(2**31)
    facts = facts_of(device, seed, chosen.small)
    say("  ".join(f"{key} {value}" for key, value in facts.items()))
    report = Report(chosen.out, facts, chosen.deadline_s)
    from engine.gpu.steps import free_memory

    if "kernels" in chosen.only:
        run_kernels(report, device, seed, chosen.small)
        free_memory(device)
    if "steps" in chosen.only:
        run_steps(report, device, seed, chosen.small)
        free_memory(device)
    if "twin" in chosen.only:
        run_twin(report, device, chosen.small, chosen.out)
    say(f"results in {chosen.out}; " + (f"failed: {', '.join(report.failed)}" if report.failed else "nothing failed"))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
