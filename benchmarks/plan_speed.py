"""How long a plan and a sweep take.

    python -m benchmarks.plan_speed plan                 scenarios/plan-azure-conversation.yaml, on two workers
    python -m benchmarks.plan_speed sweep                overhead of a point over the simulation itself

CPU seconds include the workers. Wall seconds depend on what else the machine does: on an idle machine of two cores a plan takes
about half its CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

from serving.scenario import from_mapping, load
from sim.cli import spare_the_collector
from sim.run import simulate
from sim.study.executors import open_pool
from sim.study.plan import make_plan
from sim.study.points import Points
from sim.study.sweep import points_of, run_sweep


def cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def time_plan(name: str, jobs: int) -> None:
    """Make the plan of a scenario once."""
    base = load(name)
    before_s, began = cpu_s(), time.perf_counter()
    with Points(None) as store, open_pool("local", jobs) as use:
        done = make_plan(base, use, store)
    wall_s, used_s = time.perf_counter() - began, cpu_s() - before_s
    print("\n".join(done["headline"]))
    print(json.dumps(done["searched"]))
    print(f"wall {wall_s:.1f} s, CPU {used_s:.1f} s: {used_s / 2:.1f} s on two cores of their own")


def time_sweep(points: int) -> None:
    """The CPU time of a sweep's points beside that of the same simulations alone, in this process."""
    base = load("chat-8b", ["workload.requests=500"])
    wanted = [{"workload.arrivals.rate_rps": 10.0 + i / 10} for i in range(points)]
    spare_the_collector()
    planned = points_of(base, wanted, 1)
    scenarios = [from_mapping(point.scenario) for point in planned]
    for scenario in scenarios[:5]:
        simulate(scenario, records=False)
    began = time.process_time()
    for scenario in scenarios:
        simulate(scenario, records=False)
    alone_s = time.process_time() - began
    began = time.process_time()
    with Points(None) as store, open_pool("local", 1) as use:
        run_sweep(points_of(base, wanted, 1), use, store)
    swept_s = time.process_time() - began
    print(f"{points} points: {alone_s / points * 1e3:.1f} ms each alone, {swept_s / points * 1e3:.1f} ms in a sweep, overhead {(swept_s - alone_s) / points * 1e3:.2f} ms")
    for backend, jobs in (("local", 2), ("ray", 2)):
        try:
            began, before_s = time.perf_counter(), cpu_s()
            with Points(None) as store, open_pool(backend, jobs) as use:
                started_s = time.perf_counter() - began
                run_sweep(planned, use, store)
                wall_s = time.perf_counter() - began
            print(f"{backend}, {jobs} workers: {wall_s:.2f} s wall of which start {started_s:.2f} s, CPU {cpu_s() - before_s:.2f} s")
        except ValueError as error:
            print(f"{backend}: {error}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("plan", "sweep"))
    parser.add_argument("--scenario", default="plan-azure-conversation")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--points", type=int, default=100)
    arguments = parser.parse_args()
    if arguments.what == "plan":
        time_plan(arguments.scenario, arguments.jobs)
    else:
        time_sweep(arguments.points)


if __name__ == "__main__":
    main()
