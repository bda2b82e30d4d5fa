"""The loop from the engine to the simulator and back: profile, serve, calibrate, predict what was held out, check every decision again.

The engine runs in this process; everything after it is the ``twinserve`` command in processes of its own, as a user would call it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.build import Choices, build_engine, normalised
from engine.clocks import Clock, RealClock
from engine.measure import measure, spare_the_collector
from engine.profile import designed_cases, today, write_run
from engine.run import Engine, serve_scenario
from serving.errors import InputError
from serving.scenario import load

ROOT = Path(__file__).resolve().parents[2]
REFERENCE_S = 0.005  # of the normalised clock, where the device is a processor that others use too
CALIBRATION = "calibration"
FITS = {"served": (CALIBRATION,), "profiled-and-served": ("profile", CALIBRATION)}  # name -> the runs it is fitted to


class Plan(NamedTuple):
    """What to serve. ``runs`` are overrides by name: one is called ``calibration``, the others are held out."""

    scenario: str
    overrides: tuple[str, ...]
    runs: Mapping[str, tuple[str, ...]]
    profile_s: float


LARGE = Plan(
    "gpu-8b", (),
    {
        CALIBRATION: (),
        "held-out-busier": ("workload.requests=300", "workload.arrivals.rate_rps=14.0", "seed=22"),
        "held-out-busier-again": ("workload.requests=300", "workload.arrivals.rate_rps=14.0", "seed=22"),
        "held-out-longer": ("workload.requests=160", "workload.arrivals.rate_rps=5.0", "workload.prompt_tokens.median=2048",
                            "workload.output_tokens.median=64", "seed=23"),
    },
    45.0,
)  # fmt: skip
SMALL = Plan(
    "engine-tiny", ("workload.requests=24", "workload.arrivals.rate_rps=20.0", "kv_cache.blocks=160"),
    {CALIBRATION: (), "held-out-busier": ("workload.arrivals.rate_rps=40.0", "seed=22")}, 8.0,
)  # fmt: skip


def measure_runs(plan: Plan, choices: Choices, gpu: str | None, out: Path) -> dict[str, Any]:
    """Profile and serve; returns each run's means. Writes run directories below ``out``. Raises InputError as the engine does."""
    base = [*plan.overrides, *([f"cluster.gpu={gpu}"] if gpu else [])]
    scenario = load(plan.scenario, base)
    engine = build_engine(scenario, choices)
    engine, clock = _clocked(engine)
    facts = {"device": engine.device, "llm": scenario.llm, "versions": dict(engine.versions or {})}
    with spare_the_collector():
        measured = measure(
            engine.runner, clock, designed_cases(scenario, engine), out / "profile.measurements.jsonl", facts, seed=scenario.seed,
            block_tokens=scenario.kv_cache.block_tokens, vocab=engine.vocab, budget_s=plan.profile_s, target=0.02,
        )  # fmt: skip
        write_run(scenario, engine, measured, out / "profile")
        found: dict[str, Any] = {"device": engine.device, "blocks": engine.blocks, "profiled_steps": len(measured.results)}
        for name, overrides in plan.runs.items():
            run = load(plan.scenario, [*base, *overrides])
            engine, clock = _clocked(engine)
            summary = serve_scenario(run, engine, clock, out=out / name, measured_on=today()).summary
            found[name] = {key: summary[key]["mean"] for key in ("ttft_s", "tpot_s", "e2e_s")} | {
                "output_tokens_per_s": summary["output_tokens_per_s"], "duration_s": summary["duration_s"], "steps": summary["steps"],
            }  # fmt: skip
    stats = engine.runner.graphs.stats
    found["graphs"] = {name: getattr(stats, name) for name in stats.__slots__}
    return found


def _clocked(engine: Engine) -> tuple[Engine, Clock]:
    """A fresh clock: real seconds on a GPU, normalised ones on a processor."""
    if engine.runner.device.type == "cuda":
        return engine, RealClock()
    fresh, clock = normalised(engine, REFERENCE_S)
    return (engine if "normalised" in engine.device else fresh), clock


def judge(plan: Plan, out: Path) -> dict[str, Any]:
    """Calibrate, predict the runs that were held out, compare, and check every decision of every run again."""
    found: dict[str, Any] = {"calibration": {}, "compared": {}, "parity": {}}
    for name, sources in FITS.items():
        fit = out / f"fit-{name}.yaml"
        done = _twinserve("calibrate", *(out / source for source in sources), "--out", fit, "--json")
        if done.returncode:
            found["calibration"][name] = {"refused": done.stderr.strip()}
            continue
        found["calibration"][name] = json.loads(done.stdout)
        found["compared"][name] = {run: _predict(out, run, name, fit) for run in plan.runs if run != CALIBRATION}
    for run in plan.runs:
        found["parity"][run] = json.loads(_twinserve("parity", out / run, "--json").stdout)
    return found


def _predict(out: Path, run: str, fit_name: str, fit: Path) -> dict[str, Any]:
    """The error of the simulator on one run: its scenario, as it was resolved there, with the fit as latency model."""
    import yaml

    scenario = yaml.safe_load((out / run / "run.yaml").read_text(encoding="utf-8"))["scenario"]
    scenario["latency"] = {"name": "fitted", "file": str(fit.resolve())}
    file, simulated = out / f"{run}.{fit_name}.yaml", out / f"{run}.{fit_name}.simulated"
    file.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
    done = _twinserve("run", file, "--out", simulated, "--json")
    if done.returncode:
        raise InputError(str(file), f"cannot be simulated: {done.stderr.strip()}")
    return json.loads(_twinserve("compare", out / run, simulated, "--json").stdout)["metrics"]


def _twinserve(*arguments: Any) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "twinserve", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
