"""The load of a workload: how much arrives, when most, and the same workload made heavier."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from serving.errors import InputError
from serving.request import Arrival
from serving.scenario import Scenario, Workload
from serving.scenario.arrivals import AllAtOnce, Arrivals, ClosedLoop, Piecewise, RatePerMinute
from serving.workload import follows_answers, open_arrivals

KEPT = 300_000  # requests of a workload that are held in memory; larger ones are simulated without slices and early ends
_SLICE_S = 300.0
_SLICES = 8  # a slice is at most this part of all requests


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives under one seed. ``by_class`` counts the requests that are measured; ``slice_s`` is the busiest stretch of time.

    ``requests`` 0: not known before it is simulated (closed loops, sessions, or more than are kept).
    """

    requests: int
    by_class: dict[str, int]
    mean_rps: float
    peak_rps: float
    slice_s: tuple[float, float]


UNKNOWN = Load(0, {}, 0.0, 0.0, (0.0, 0.0))


def requests_of(scenario: Scenario, max_model_len: int) -> Iterator[Arrival]:
    """The scenario's requests, whose arrivals wait for nothing."""
    return open_arrivals(
        scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=max_model_len,
        prefix_caching=scenario.kv_cache.prefix_caching, slo=scenario.slo,
    )  # fmt: skip


def measure(scenario: Scenario, max_model_len: int) -> Load:
    """Draw the workload once and look at it. Raises InputError for one whose rate follows the fleet's capacity."""
    _refuse_relative(scenario.workload)
    if follows_answers(scenario.workload):
        return UNKNOWN
    arrivals = list(itertools.islice(requests_of(scenario, max_model_len), KEPT + 1))
    if len(arrivals) > KEPT:
        return UNKNOWN
    first_s = scenario.measure.warmup_s
    by_class: dict[str, int] = {}
    for request, _ in arrivals:
        if request.arrival_s >= first_s:
            by_class[request.class_name] = by_class.get(request.class_name, 0) + 1
    end_s = arrivals[-1].request.arrival_s
    last_s = max(first_s, end_s - scenario.measure.cooldown_s)
    times = [request.arrival_s for request, _ in arrivals if first_s <= request.arrival_s <= last_s]
    weights = [request.prompt_tokens + tokens for (request, tokens) in arrivals if first_s <= request.arrival_s <= last_s]
    start, stop = _busiest(times, weights)
    slice_s = (times[start], times[stop - 1]) if times else (0.0, 0.0)
    width_s = slice_s[1] - slice_s[0]
    return Load(len(arrivals), by_class, len(arrivals) / end_s if end_s else 0.0, (stop - start) / width_s if width_s else 0.0, slice_s)


def _busiest(times: list[float], weights: list[int]) -> tuple[int, int]:
    """Rows [start, stop) of the stretch with the most tokens: five minutes long, or shorter where that holds too large a part."""
    n = len(times)
    if n < 2:
        return 0, n
    width_s = min(_SLICE_S, (times[-1] - times[0]) / _SLICES)
    best, best_at, held, start = -1, (0, n), 0, 0
    for stop in range(n):
        held += weights[stop]
        while times[stop] - times[start] > width_s:
            held -= weights[start]
            start += 1
        if held > best:
            best, best_at = held, (start, stop + 1)
    return best_at


def _refuse_relative(workload: Workload) -> None:
    arrivals = workload.arrivals
    pieces = arrivals.pieces if isinstance(arrivals, Piecewise) else (arrivals,)
    if workload.trace is None and any(getattr(piece, "load_factor", None) is not None for piece in pieces):
        raise InputError("workload.arrivals.load_factor", "makes the load follow whatever fleet is tried", "a plan needs rate_rps")


def is_recorded(workload: Workload) -> bool:
    """Whether the workload is a trace with its own arrival times: then there is nothing random about it."""
    return workload.trace is not None and workload.closed_loop is None


def scaled(scenario: Scenario, factor: float) -> Scenario:
    """The scenario with arrivals that come ``factor`` times as fast; with a closed loop, with so many times the users."""
    workload = scenario.workload
    if is_recorded(workload):
        update: dict = {"trace": workload.trace.model_copy(update={"rate_scale": workload.trace.rate_scale * factor})}
    elif workload.arrivals is not None:
        update = {"arrivals": _faster(workload.arrivals, factor)}
    else:
        return scenario
    return scenario.model_copy(update={"workload": workload.model_copy(update=update)})


def _faster(arrivals: Arrivals, factor: float) -> Arrivals:
    if isinstance(arrivals, ClosedLoop):
        return arrivals.model_copy(update={"users": max(1, round(arrivals.users * factor))})
    if isinstance(arrivals, AllAtOnce):
        return arrivals
    if isinstance(arrivals, RatePerMinute):
        return arrivals.model_copy(update={"rate_scale": arrivals.rate_scale * factor})
    if isinstance(arrivals, Piecewise):
        pieces = tuple(piece.model_copy(update={"rate_rps": piece.rate_rps * factor}) for piece in arrivals.pieces)
        return arrivals.model_copy(update={"pieces": pieces})
    return arrivals.model_copy(update={"rate_rps": arrivals.rate_rps * factor})
