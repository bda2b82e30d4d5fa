"""How far off the simulator is from the engine on a CPU: calibrate on some runs, predict other workloads.

    python benchmarks/engine_vs_sim.py [--repeats 4] [--requests 80] [--folder DIR] [--json]

A calibration run has a seed of its own each time, at a moderate and at a crowded rate in turn: the same requests again would show the fit
the same few step shapes, and a fit says little of batches that it never saw. The workloads to predict have other seeds, rates and lengths.
Runs of all of them take turns, so that a drift of the machine meets them all. Times are on the normalised clock (``engine.clocks``):
processor seconds of the engine's thread, relative to a fixed reference step beside each step. Beside every error stands the real
side's own spread: the half range of its repeats, as a fraction of their median. An error within it says nothing against the simulator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.build import Choices, build_engine, normalised
from engine.measure import spare_the_collector
from engine.run import Engine, serve_scenario
from serving.records import open_run
from serving.scenario import Scenario, from_mapping, load
from sim.run import simulate
from validate.calibrate import calibrate, write

REFERENCE_S = 0.005
CALIBRATION_RPS = (8.0, 25.0)  # of the calibration runs, in turn
CALIBRATION_SEED = 11  # of the first; each has its own
HOLDOUTS = {  # name -> what differs from a calibration run at the moderate rate
    "holdout-faster": ["workload.arrivals.rate_rps=14.0", "seed=101"],
    "holdout-busier": ["workload.arrivals.rate_rps=40.0", "seed=303"],
    "holdout-longer": ["workload.prompt_tokens.median=96", "workload.output_tokens.median=16", "seed=202"],
}
COMMON = ["kv_cache.blocks=160", "workload.arrivals.rate_rps=8.0"]
METRICS = (("tpot_s", "mean"), ("output_tokens_per_s", None), ("ttft_s", "p50"), ("ttft_s", "p99"), ("ttft_s", "mean"), ("e2e_s", "mean"))


def main() -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--folder", type=Path, default=None, help="keep the run directories here")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        result = experiment(folder, chosen.repeats, chosen.requests)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        report(result)


def calibration_scenario(repeat: int, requests: int) -> Scenario:
    """The ``repeat``-th workload to calibrate on."""
    rate = CALIBRATION_RPS[repeat % len(CALIBRATION_RPS)]
    changes = [f"workload.requests={requests}", f"workload.arrivals.rate_rps={rate}", f"seed={CALIBRATION_SEED + repeat}"]
    return load("engine-tiny", [*COMMON, *changes])


def experiment(folder: Path, repeats: int, requests: int) -> dict:
    """Serve, calibrate, simulate; returns errors and spreads by workload."""
    holdouts = {name: load("engine-tiny", [*COMMON, f"workload.requests={requests}", *changes]) for name, changes in HOLDOUTS.items()}
    engine = build_engine(calibration_scenario(0, requests), Choices(device="cpu"))
    real: dict[str, list[dict]] = {name: [] for name in holdouts}
    calibrated_on: list[Path] = []
    with spare_the_collector():
        for repeat in range(repeats):
            calibrated_on.append(folder / f"calibration-{repeat}")
            _serve(calibration_scenario(repeat, requests), engine, calibrated_on[-1])
            for name, scenario in holdouts.items():
                real[name].append(_serve(scenario, engine, folder / f"{name}-{repeat}"))
    fit = calibrate(calibrated_on)
    if not fit.accepted:
        sys.exit(f"calibration refused: {fit.reason}")
    write(fit.fit, folder / "fit.yaml")
    simulated = {name: simulate(_with_fit(folder / f"{name}-0", folder / "fit.yaml"), saturated_rps=1.0).summary for name in holdouts}
    return {
        "holdout_steps": fit.as_json()["holdout"],
        "workloads": {
            name: [_compare(real[name], simulated[name], metric, statistic) for metric, statistic in METRICS] for name in holdouts
        },
    }


def _serve(scenario: Scenario, engine: Engine, out: Path) -> dict:
    summary = serve_scenario(scenario, *normalised(engine, REFERENCE_S), out=out).summary
    print(f"{out.name}: {summary['duration_s']:.1f} s", file=sys.stderr)
    return summary


def _with_fit(run: Path, fit: Path) -> Scenario:
    scenario = dict(open_run(run).info["scenario"])
    scenario["latency"] = {"name": "fitted", "file": str(fit)}
    return from_mapping(scenario)


def _compare(real: list[dict], simulated: dict, metric: str, statistic: str | None) -> dict:
    def value(summary: dict) -> float:
        return summary[metric] if statistic is None else summary[metric][statistic]

    values = [value(summary) for summary in real]
    middle = statistics.median(values)
    return {
        "metric": metric, "statistic": statistic, "real": middle, "simulated": value(simulated),
        "error": value(simulated) / middle - 1, "noise": (max(values) - min(values)) / 2 / middle,
    }  # fmt: skip


def report(result: dict) -> None:
    """Print errors with the real side's spread beside each."""
    print(f"steps held out: {result['holdout_steps']['mape']:.1%} mean absolute error, total {result['holdout_steps']['bias']:+.1%}")
    print(f"{'workload':<16}{'metric':<26}{'real':>10}{'simulated':>11}{'error':>9}{'noise':>9}")
    for name, rows in result["workloads"].items():
        for row in rows:
            label = f"{row['statistic'] or ''} {row['metric']}".strip()
            print(f"{name:<16}{label:<26}{row['real']:>10.4g}{row['simulated']:>11.4g}{row['error']:>+9.1%}{row['noise']:>9.1%}")


if __name__ == "__main__":
    main()
