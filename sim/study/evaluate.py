"""What a worker computes for a plan: the saturated rate of a replica, the fewest replicas that survive the busiest slice,
the verdict on a fleet over the whole workload, and its head-room. Arguments and results are plain JSON data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from serving.metrics import Metrics
from serving.request import Arrival
from serving.scenario import Measure, Scenario, from_mapping
from sim.bottleneck import bottleneck
from sim.fleet import resolve_fleet
from sim.run import RunResult, simulate
from sim.saturation import saturated_fleet_rps
from sim.study.candidates import with_replicas
from sim.study.load import UNKNOWN, Load, is_recorded, measure, requests_of, scaled
from sim.study.verdict import FEASIBLE, INFEASIBLE, OPEN, decide, refuted

Data = dict[str, Any]
Counts = dict[str, tuple[int, int]]  # by class: met, measured
_DRAWN: OrderedDict[str, tuple[Load, list[Arrival]]] = OrderedDict()  # workloads drawn last, for the next task of this worker
_HELD = 4
_ROOM = 8.0  # head-room is looked for up to this many times the load
_RESOLUTION = 1.02  # and to this precision
_UNASKED_RPS = 1.0  # stands for the saturated rate where nobody reads the load factor: measuring it would cost more than a slice


class Watched(NamedTuple):
    """A run that may have ended early, because it was ``lost``."""

    result: RunResult
    lost: bool
    counts: Counts


def replica_rate(scenario: Data) -> Data:
    """Saturated requests per second of one replica (or group of pools); null where the workload is too small to tell."""
    return {"rps": saturated_fleet_rps(resolve_fleet(from_mapping(scenario)))}


def screen(scenario: Data, first: int, least: int, most: int, level: float) -> Data:
    """The fewest replicas between ``least`` and ``most`` that the busiest slice of the workload does not refute.

    The slice starts on an idle fleet, so it is easier than the same minutes within the whole: who misses more objectives in it
    than the whole workload may miss is refused. Starting from ``first``, a guess, upwards in growing strides and then by
    bisection; downwards as long as the guess was too careful. ``replicas`` is null when ``most`` do not suffice.
    """
    one = from_mapping(scenario)
    runs = 0
    seen: dict[int, RunResult] = {}

    def survives(replicas: int) -> bool:
        nonlocal runs
        runs += 1
        done = _slice(with_replicas(one, replicas), level)
        seen[replicas] = done.result
        return not done.lost

    replicas = _fewest(survives, max(least, min(first, most)), least, most)
    why = "" if replicas is not None else missed_objective(seen[most].summary, one)
    return {"replicas": replicas, "runs": runs, "why": why}


def _fewest(survives: Callable[[int], bool], first: int, least: int, most: int) -> int | None:
    if survives(first):
        while first > least and survives(first - 1):
            first -= 1
        return first
    low, stride = first, 1
    while True:
        high = min(low + stride, most)
        if low == most:
            return None
        if survives(high):
            break
        low, stride = high, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if survives(middle) else (middle, high)
    return high


def _slice(scenario: Scenario, level: float) -> Watched:
    load, arrivals = _drawn(scenario)
    if not load.requests:
        return _watch(scenario, arrivals, _never, _UNASKED_RPS)
    first_s, last_s = load.slice_s
    part = [arrival for arrival in arrivals if first_s <= arrival.request.arrival_s <= last_s]
    return _watch(scenario.model_copy(update={"measure": Measure()}), part, _refuter(scenario, load, level), _UNASKED_RPS)


def _refuter(scenario: Scenario, load: Load, level: float) -> Callable[[dict[str, int]], bool]:
    """Whether misses by class refute the fleet already, however the rest of the whole workload may turn out."""
    exact, target = is_recorded(scenario.workload), scenario.slo.attainment
    return lambda missed: any(refuted(count, load.by_class.get(name, 0), target, level, exact=exact) for name, count in missed.items() if count)


def _never(missed: dict[str, int]) -> bool:
    return False


def _watch(run: Scenario, arrivals: list[Arrival], hopeless: Callable[[dict[str, int]], bool], saturated_rps: float | None) -> Watched:
    """Simulate, ending early once ``hopeless(misses by class)``; without ``arrivals`` the workload's own clients act."""
    counts: Counts = {}
    watched: list[Metrics] = []

    def stop(metrics: Metrics) -> bool:
        watched[:] = [metrics]
        counts.update(metrics.met_and_measured())
        return hopeless({name: measured - met for name, (met, measured) in counts.items()})

    result = simulate(run, records=False, arrivals=arrivals or None, stop=stop, saturated_rps=saturated_rps)
    lost = stop(watched[0])
    if result.partial and not lost:
        raise KeyboardInterrupt
    return Watched(result, lost, counts)


def _drawn(scenario: Scenario) -> tuple[Load, list[Arrival]]:
    """The load and requests of a scenario, drawn once for all candidates of this worker that share them."""
    longest = min(part.max_model_len for part in resolve_fleet(scenario).values())
    cache = scenario.kv_cache
    key = repr((scenario.workload, scenario.slo, scenario.measure, scenario.seed, cache.block_tokens, cache.prefix_caching, longest))
    if key not in _DRAWN:
        load = measure(scenario, longest)
        _DRAWN[key] = (load, [] if load == UNKNOWN else list(requests_of(scenario, longest)))
        while len(_DRAWN) > _HELD:
            _DRAWN.popitem(last=False)
    _DRAWN.move_to_end(key)
    return _DRAWN[key]


def confirm(scenario: Data, replicas: int, replica_rps: float | None, level: float, fewest_runs: int, most_runs: int) -> Data:
    """The verdict on a fleet over the whole workload: replications until the interval decides, at most ``most_runs``.

    ``replica_rps`` is what ``replica_rate`` returned. The summary is that of the first seed, equal to what ``run`` prints for it.
    ``verdict`` open means that the replications allowed did not decide. A run ends early once it refutes the fleet by itself.
    """
    fleet = with_replicas(from_mapping(scenario), replicas)
    exact, target = is_recorded(fleet.workload), fleet.slo.attainment
    saturated = None if replica_rps is None else replica_rps * replicas
    counts: list[Counts] = []
    summaries: list[Data] = []
    verdict = OPEN
    for seed in range(fleet.seed, fleet.seed + (1 if exact else most_runs)):
        run = fleet.model_copy(update={"seed": seed})
        load, arrivals = _drawn(run)
        hopeless = _refuter(run, load, level) if load.requests else _never
        done = _watch(run, arrivals, hopeless, saturated)
        counts.append(done.counts)
        summaries.append({**done.result.summary, "peak_load_factor": load.peak_rps / saturated if saturated and load.requests else None})
        if done.lost:
            verdict = INFEASIBLE
            break
        verdict = decide(counts, target, level, exact=exact, minimum=fewest_runs)
        if verdict in (FEASIBLE, INFEASIBLE):
            break
    return {"verdict": verdict, "replications": len(counts), "counts": counts, "summary": summaries[0], "why": "" if verdict == FEASIBLE else missed_objective(summaries[-1], fleet),
            "load_factors": [each["load_factor"] for each in summaries], "peak_load_factor": summaries[0]["peak_load_factor"]}  # fmt: skip


def missed_objective(summary: Data, scenario: Scenario) -> str:
    """The objective that is missed by most at the quantile asked for, in words; empty when none is."""
    quantile = max((name for name in ("p50", "p90", "p95", "p99") if int(name[1:]) / 100 <= scenario.slo.attainment + 1e-9), default="p50")
    names = list(summary["slo_attainment"]["by_class"])
    worst, words = 1.0, ""
    for index, (key, label) in enumerate((("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))):
        limits_s = [scenario.slo.targets(name)[index] for name in names]
        limit_s = min(limits_s, default=float("inf"))
        value_s = summary[key][quantile]
        if value_s is not None and value_s / limit_s > worst:
            whose = " of the strictest class" if max(limits_s) > limit_s else ""
            worst, words = value_s / limit_s, f"{label} {quantile} is {value_s * 1e3:,.0f} ms, asked are {limit_s * 1e3:g} ms{whose}"
    refused = summary["requests"]["rejected"] + summary["requests"]["failed"]
    if not words and refused:
        return f"{refused:,} requests were refused or failed"
    return words or "some class misses its objectives, though no quantile over all classes does"


def headroom(scenario: Data, replicas: int, replica_rps: float | None, error: float) -> Data:
    """How much more load the fleet takes until its objectives break (first seed), and what breaks then.

    ``scale`` is the largest load tried that holds, ``breaks_at`` the smallest that does not (null up to eight times the load).
    ``ttft_p99_range_s`` is the p99 if capacity is off by ``error`` either way.
    """
    fleet = with_replicas(from_mapping(scenario), replicas)
    saturated = None if replica_rps is None else replica_rps * replicas
    broken: RunResult | None = None
    low, high = 1.0, None
    while (high is None and low < _ROOM) or (high is not None and high / low > _RESOLUTION):
        scale = min(1.25 * low, _ROOM) if high is None else (low * high) ** 0.5
        result = _breaks(scaled(fleet, scale), saturated)
        if result is None:
            low = scale
        else:
            high, broken = scale, result
    edges = [_ttft_p99(scaled(fleet, factor)) for factor in (1 / (1 + error), 1 / (1 - error))] if error else None
    return {"scale": low, "breaks_at": high, "ttft_p99_range_s": edges,
            "why": "" if broken is None else missed_objective(broken.summary, fleet),
            "bottleneck": "" if broken is None else bottleneck(broken.summary, broken.fleet, fleet.slo)}  # fmt: skip


def _breaks(fleet: Scenario, saturated_rps: float | None) -> RunResult | None:
    """None when the fleet attains its objectives, else the (perhaps shortened) run that shows it does not."""
    load, arrivals = _drawn(fleet)
    target = fleet.slo.attainment

    def hopeless(missed: dict[str, int]) -> bool:
        return any(count > (1 - target) * load.by_class.get(name, 0) + 1e-9 for name, count in missed.items())

    done = _watch(fleet, arrivals, hopeless if load.requests else _never, saturated_rps)
    attained = all(met >= target * measured for met, measured in done.counts.values())
    return None if attained and not done.lost else done.result


def _ttft_p99(fleet: Scenario) -> float | None:
    _, arrivals = _drawn(fleet)
    return simulate(fleet, records=False, arrivals=arrivals or None, saturated_rps=_UNASKED_RPS).summary["ttft_s"]["p99"]
