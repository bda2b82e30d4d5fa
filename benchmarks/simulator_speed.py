"""How many requests the simulator serves per CPU second, in its benchmark scenarios.

    python -m benchmarks.simulator_speed                        every case below
    python -m benchmarks.simulator_speed saturated --requests 1000000

Times are CPU seconds of the event loop, request creation and metrics included, start-up excluded. CPU seconds still swing with
what else the machine does, so every case is framed by a reference loop of fixed work; ``ratio`` is requests per reference
second, the figure that a test gates. Each case has a process of its own, whose peak memory is told too.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from heapq import heappop, heappush
from multiprocessing import get_context

from serving.clients import start_clients
from serving.scenario import Scenario, load
from sim.cli import spare_the_collector
from sim.fleet import build_cluster, new_metrics, resolve
from sim.saturation import saturated_rps


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario at a number of requests, and the requests per CPU second it must reach on a quiet core."""

    scenario: str
    requests: int
    wanted_per_s: int


CASES = {
    "saturated": Case("benchmark-8b-512-128", 100_000, 50_000),
    "saturated-10k": Case("benchmark-8b-512-128", 10_000, 40_000),
    "saturated-1m": Case("benchmark-8b-512-128", 1_000_000, 40_000),
    "priority": Case("benchmark-8b-priority", 100_000, 50_000),
    "low-load": Case("benchmark-8b-low-load", 30_000, 25_000),
    "closed-loop": Case("benchmark-8b-closed-loop", 50_000, 15_000),
    "prefix": Case("benchmark-8b-prefix-32-blocks", 50_000, 20_000),
    "fleet": Case("fleet-1000", 1_000_000, 10_000),
}


def reference_s() -> float:
    """CPU seconds of a fixed loop of the simulator's kind of work: a heap, a dictionary, small tuples, float sums."""
    began = time.process_time()
    heap: list[tuple[float, int]] = []
    held: OrderedDict[int, tuple[int, float]] = OrderedDict()
    total = 0.0
    for i in range(200_000):
        heappush(heap, ((i * 7919) % 1_000_003 * 0.001, i))
        held[i] = (i, i * 0.5)
        if len(heap) > 64:
            due, key = heappop(heap)
            total += due + held.pop(key)[1]
    return time.process_time() - began


def measure(scenario: Scenario) -> tuple[float, float, int]:
    """Return CPU seconds of the loop, CPU seconds of the reference around it, and the requests that were served."""
    parts = resolve(scenario)
    saturation_rps = saturated_rps(parts) if scenario.workload.closed_loop is None else None
    cluster = build_cluster(parts, new_metrics(scenario))
    start_clients(
        cluster, scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=parts.max_model_len,
        prefix_caching=scenario.kv_cache.prefix_caching, saturation_rps=saturation_rps, slo=scenario.slo,
    )  # fmt: skip
    spare_the_collector()
    before_s = reference_s()
    began = time.process_time()
    cluster.env.run()
    cluster.drain()
    took_s = time.process_time() - began
    return took_s, (before_s + reference_s()) / 2, cluster.arrived


def run_case(name: str, requests: int | None = None) -> dict[str, float]:
    """Run one case and return its figures."""
    case = CASES[name]
    scenario = load(case.scenario, [f"workload.requests={requests or case.requests}"])
    took_s, around_s, served = measure(scenario)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"requests": served, "cpu_s": took_s, "per_cpu_s": served / took_s, "ratio": served / (took_s / around_s), "reference_s": around_s, "peak_mib": peak_mib}


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help="one of " + ", ".join(CASES) + "; default: all but the two largest")
    parser.add_argument("--requests", type=int)
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"no case '{name}'; choose from {', '.join(CASES)}")
    chosen = arguments.cases or [name for name, case in CASES.items() if case.requests < 1_000_000]
    print(f"{'case':<14} {'requests':>9} {'CPU s':>7} {'per CPU s':>10} {'wanted':>7} {'reference s':>11} {'ratio':>8} {'peak MiB':>9}")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:  # no case inherits another's memory
        for name in chosen:
            row = alone.submit(run_case, name, arguments.requests).result()
            print(
                f"{name:<14} {row['requests']:>9,} {row['cpu_s']:>7.2f} {row['per_cpu_s']:>10,.0f} {CASES[name].wanted_per_s:>7,} "
                f"{row['reference_s']:>11.3f} {row['ratio']:>8,.0f} {row['peak_mib']:>9,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
