"""How far off the simulator is from the engine on a CPU: calibrate on one workload, predict others.

    python benchmarks/engine_vs_sim.py [--repeats 4] [--requests 80] [--folder DIR] [--json]

Runs of all workloads take turns, so that a drift of the machine meets them all. Times are on the normalised clock (``engine.clocks``):
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
from engine.run import serve_scenario
from serving.records import open_run
from serving.scenario import Scenario, from_mapping, load
from sim.run import simulate
from validate.calibrate import calibrate, write

REFERENCE_S = 0.005
WORKLOADS = {  # name -> what differs from the one that is calibrated on
    "calibration": [],
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


def scenarios(requests: int) -> dict[str, Scenario]:
    """The workloads, on one engine."""
    return {name: load("engine-tiny", [*COMMON, f"workload.requests={requests}", *changes]) for name, changes in WORKLOADS.items()}


def experiment(folder: Path, repeats: int, requests: int) -> dict:
    """Serve, calibrate, simulate; returns errors and spreads by workload."""
    workloads = scenarios(requests)
    engine = build_engine(workloads["calibration"], Choices(device="cpu"))
    real: dict[str, list[dict]] = {name: [] for name in workloads}
    runs: dict[str, list[Path]] = {name: [] for name in workloads}
    with spare_the_collector():
        for repeat in range(repeats):
            for name, scenario in workloads.items():
                out = folder / f"{name}-{repeat}"
                real[name].append(serve_scenario(scenario, *normalised(engine, REFERENCE_S), out=out).summary)
                runs[name].append(out)
                print(f"{name}, repeat {repeat}: {real[name][-1]['duration_s']:.1f} s", file=sys.stderr)
    fit = calibrate(runs["calibration"])
    if not fit.accepted:
        sys.exit(f"calibration refused: {fit.reason}")
    write(fit.fit, folder / "fit.yaml")
    simulated = {name: simulate(_with_fit(runs[name][0], folder / "fit.yaml"), saturated_rps=1.0).summary for name in workloads}
    return {
        "holdout_steps": fit.as_json()["holdout"],
        "workloads": {name: [_compare(real[name], simulated[name], metric, statistic) for metric, statistic in METRICS] for name in workloads},
    }


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
