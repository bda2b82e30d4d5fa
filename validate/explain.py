"""Why the slowest requests were slow: each one's latency split by cause, the parts adding up to the whole.

Every instant between arrival and finish belongs to exactly one cause. Time while a replica runs steps is split by what the
step did; time while it runs none is a stall. Per replica the split is a set of cumulative curves over time, so that the parts
of a request are differences of interpolated values: all requests of a run at once, in O(steps + requests log steps).

What a step did comes from the run itself: see `validate.step_parts`.

What the records cannot tell is estimated and named in `ESTIMATED`: who shared a prefill step (in proportion to tokens) and, without
plans, when a preempted request was out (the steps of its decode phase that gave it no token). Where prompts and answers have pools
of their own, a request's prefill replica is the one that ended a step at its first token, and it was handed over until the first
of the decode steps that it needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from serving.errors import InputError, nearest
from serving.scenario.stages import INTEGRITY, NETWORK
from validate.run_data import Columns, RunData
from validate.step_parts import fit_step_parts

LABELS: Mapping[str, str] = {
    "stage_queue": "waiting for a stage",
    "stage": "stages before the model",
    "integrity": "checked, or waiting for it",
    "network": "on the way to its site",
    "queue": "waiting in the queue",
    "prefill": "its own prompt",
    "decode": "its own decoding",
    "prefill_interference": "other requests' prefills",
    "preemption": "preempted",
    "transfer": "hand-over to decode",
    "graph_miss": "outside captured graphs",
    "host_stall": "replica stood idle",
    "clock": "slow clock or GPU",
    "cold_start": "cold start",
}
ESTIMATED = ("prefill_interference", "preemption", "transfer")
CAUSES = tuple(LABELS)
METRICS = ("ttft_s", "tpot_s", "e2e_s")
_GAP, _COLD = 4, 5  # the curves kept per replica: the four parts of its steps, then the time between them and before them


class Cause(NamedTuple):
    """One cause, over the slowest requests. Seconds per request; ``excess_s`` is what they spent beyond typical ones.

    ``share`` is the part of the whole excess; ``requests`` counts the slow requests that this cause delayed most, of which
    ``worst_request`` lost the most time to it (-1: none).
    """

    cause: str
    label: str
    mean_s: float
    typical_s: float
    excess_s: float
    share: float
    requests: int
    worst_request: int


class Attribution(NamedTuple):
    """Parts per completed request, [requests, causes] in the order of ``CAUSES``, for latencies ``whole_s`` [requests]."""

    request_id: np.ndarray
    whole_s: np.ndarray
    parts_s: np.ndarray


class _Curves(NamedTuple):
    """Cumulative seconds by kind and cumulative counts of one replica, at the ends of its steps."""

    times_s: np.ndarray  # [2 n + 1]: start of time, then start and end of each step
    seconds: np.ndarray  # [6, 2 n + 1]
    prefill_tokens: np.ndarray  # [2 n + 1]
    decode_steps: np.ndarray  # [2 n + 1]: steps that gave each decoding request a token

    def between(self, curve: np.ndarray, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
        return np.interp(end_s, self.times_s, curve) - np.interp(start_s, self.times_s, curve)


Timelines = dict[int, _Curves]  # by replica


def _curves(steps: Columns, parts: np.ndarray, rows: np.ndarray) -> _Curves:
    """Lay the steps ``rows`` of one replica along time; where two overlap (plans in flight), the later one starts later."""
    rows = rows[np.argsort(steps["start_s"][rows], kind="stable")]
    end = np.maximum.accumulate(steps["start_s"][rows] + steps["duration_s"][rows])
    start = np.maximum(steps["start_s"][rows], np.concatenate(([0.0], end[:-1])))
    start = np.minimum(start, end)
    share = (end - start) / np.maximum(parts[rows].sum(axis=1), 1e-300)
    times = np.concatenate(([0.0], np.stack([start, end], axis=1).ravel()))
    seconds = np.zeros((6, len(times)))
    seconds[:4, 2::2] = (parts[rows] * share[:, None]).T
    gaps = np.diff(times)[::2]
    seconds[_GAP, 1::2] = gaps
    seconds[_COLD, 1], seconds[_GAP, 1] = gaps[0], 0.0
    tokens, decoded = np.zeros(len(times)), np.zeros(len(times))
    tokens[2::2] = steps["prefill_tokens"][rows]
    decoded[2::2] = np.where(steps["decode_seqs"][rows] > 0, steps["steps"][rows], 0)
    return _Curves(times, seconds.cumsum(axis=1), tokens.cumsum(), decoded.cumsum())


def _put(parts: np.ndarray, cause: str, seconds: np.ndarray) -> None:
    parts[:, CAUSES.index(cause)] += seconds


def _split_queue(parts: np.ndarray, curves: _Curves, start_s: np.ndarray, end_s: np.ndarray) -> None:
    idle = curves.between(curves.seconds[_GAP], start_s, end_s)
    cold = curves.between(curves.seconds[_COLD], start_s, end_s)
    _put(parts, "host_stall", idle)
    _put(parts, "cold_start", cold)
    _put(parts, "queue", end_s - start_s - idle - cold)


def _split_prefill(parts: np.ndarray, curves: _Curves, start_s: np.ndarray, end_s: np.ndarray, own_tokens: np.ndarray) -> None:
    base, prefill, graph, clock, gap, cold = (curves.between(curve, start_s, end_s) for curve in curves.seconds)
    tokens = curves.between(curves.prefill_tokens, start_s, end_s)
    own = np.clip(np.divide(own_tokens, tokens, out=np.ones(len(tokens)), where=tokens > 0), 0.0, 1.0)
    _put(parts, "prefill_interference", (1 - own) * (base + prefill))
    _put(parts, "graph_miss", graph)
    _put(parts, "clock", clock)
    _put(parts, "host_stall", gap + cold)
    rest = end_s - start_s - (1 - own) * (base + prefill) - graph - clock - gap - cold
    _put(parts, "prefill", rest)  # what is left is its own: exact to rounding, and time past the last recorded step stays somewhere


def _landed(curves: _Curves, first_token_s: np.ndarray, finish_s: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """When requests began to decode on the replica that they were handed to: ``steps`` decode steps before they finished."""
    done = np.interp(finish_s, curves.times_s, curves.decode_steps) - steps
    at = np.clip(np.searchsorted(curves.decode_steps, done + 1e-6, side="right") - 1, 0, len(curves.times_s) - 2)
    into = done - curves.decode_steps[at]
    width = curves.decode_steps[at + 1] - curves.decode_steps[at]
    reach = np.divide(into, width, out=np.zeros(len(at)), where=width > 0) * (curves.times_s[at + 1] - curves.times_s[at])
    return np.clip(curves.times_s[at] + np.maximum(reach, 0.0), first_token_s, finish_s)


def _split_decode(parts: np.ndarray, curves: _Curves, rows: Columns, preempted_s: np.ndarray | None, handed_over: bool) -> None:
    start_s, end_s, needed = rows["first_token_s"], rows["finish_s"], rows["output_tokens"] - 1
    if handed_over:
        landed = np.where((needed > 0) & (rows["preemptions"] == 0), _landed(curves, start_s, end_s, needed), start_s)
        _put(parts, "transfer", landed - start_s)
        start_s = landed
    whole = end_s - start_s
    _, prefill, graph, clock, gap, cold = (curves.between(curve, start_s, end_s) for curve in curves.seconds)
    if preempted_s is None:
        steps = curves.between(curves.decode_steps, start_s, end_s)
        missed = np.divide(steps - needed, steps, out=np.zeros(len(steps)), where=steps > 0)
        preempted_s = np.where(rows["preemptions"] > 0, np.clip(missed, 0, 1) * (whole - gap - cold), 0.0)
    preempted_s = np.clip(preempted_s, 0.0, whole)
    present = np.divide(whole - preempted_s, whole, out=np.zeros(len(whole)), where=whole > 0)
    for cause, seconds in (("prefill_interference", prefill), ("graph_miss", graph), ("clock", clock), ("host_stall", gap + cold)):
        _put(parts, cause, present * seconds)
    _put(parts, "preemption", preempted_s)
    _put(parts, "decode", present * (whole - prefill - graph - clock - gap - cold))


def timelines(run: RunData) -> Timelines:
    """Lay out the steps of every replica along time: what `attribute` reads, made once for all metrics.

    Raises InputError when the run kept no records.
    """
    if not run.requests or not run.steps or not len(run.steps["step"]):
        raise InputError(str(run.path), "has no records to explain", "run it without --no-records")
    parts = fit_step_parts(run.steps)
    order = np.argsort(run.steps["replica"], kind="stable")
    replicas, starts = np.unique(run.steps["replica"][order], return_index=True)
    return {int(replica): _curves(run.steps, parts, rows) for replica, rows in zip(replicas, np.split(order, starts[1:]))}


def attribute(
    run: RunData, metric: str = "e2e_s", *, curves: Timelines | None = None, preempted_s: Mapping[int, float] | None = None
) -> Attribution:
    """Split ``metric`` of every completed request by cause; parts add up to the whole.

    ``ttft_s`` covers arrival to first token, ``e2e_s`` arrival to finish, ``tpot_s`` first token to finish per token (requests of
    two output tokens or more): it alone does not call a long answer slow.
    ``curves`` are the run's `timelines`; ``preempted_s`` gives seconds per request id between being preempted and being back
    (from plans), estimated when None. Raises InputError when the run kept no records or completed nothing.
    """
    if metric not in METRICS:
        raise InputError("metric", f"'{metric}' cannot be explained", nearest(metric, METRICS))
    curves = timelines(run) if curves is None else curves
    done = run.completed & np.isfinite(run.latency_s(metric)) & np.isfinite(run.requests["scheduled_s"])
    rows = {name: column[done] for name, column in run.requests.items()}
    if not len(rows["request_id"]):
        raise InputError(str(run.path), "completed no request: there is nothing to explain")
    out_s = None if preempted_s is None else np.array([preempted_s.get(int(i), 0.0) for i in rows["request_id"]])
    parts = np.zeros((len(rows["request_id"]), len(CAUSES)))
    origin = _prefill_replica(run, rows) if run.pools else rows["replica"]
    if metric != "tpot_s":
        before_s = _before_replica(run, rows, parts)
        for own, mine, local in _by_replica(run, curves, origin, rows):
            parts[mine] += _before_first_token(own, local, before_s[mine])
    if metric != "ttft_s":
        for own, mine, local in _by_replica(run, curves, rows["replica"], rows):
            split = np.zeros((len(mine), len(CAUSES)))
            handed_over = int(local["replica"][0]) in run.pools.get("decode", ())
            _split_decode(split, own, local, None if out_s is None else out_s[mine], handed_over)
            parts[mine] += split / np.maximum(local["output_tokens"] - 1, 1)[:, None] if metric == "tpot_s" else split
    return Attribution(rows["request_id"], run.latency_s(metric)[done], parts)


def _by_replica(run: RunData, curves: Timelines, replica: np.ndarray, rows: Columns) -> Iterator[tuple[_Curves, np.ndarray, Columns]]:
    """Yield (timeline, row numbers, rows) of each replica that ``replica`` names; what no replica served (-1) has no timeline."""
    for number in np.unique(replica[replica >= 0]):
        mine = np.flatnonzero(replica == number)
        if int(number) not in curves:
            raise InputError(str(run.path), f"replica {number} served requests but recorded no step")
        yield curves[int(number)], mine, {name: column[mine] for name, column in rows.items()}


def _before_replica(run: RunData, rows: Columns, parts: np.ndarray) -> np.ndarray:
    """Put what requests spent in stages and between sites into ``parts`` [requests, causes]; returns the seconds of each in all."""
    stages, ids = run.stages, rows["request_id"]
    total_s = np.zeros(len(ids))
    if not stages or not len(ids):
        return total_s
    at = np.minimum(np.searchsorted(ids, stages["request_id"]), len(ids) - 1)
    known = (ids[at] == stages["request_id"]) & (stages["entered_s"] <= rows["scheduled_s"][at])  # not those behind the answer
    network, checks = stages["stage"] == NETWORK, stages["stage"] == INTEGRITY
    plain = ~(network | checks)
    waited_s, served_s = stages["started_s"] - stages["entered_s"], stages["ended_s"] - stages["started_s"]
    spent = (("stage_queue", plain, waited_s), ("stage", plain, served_s), ("integrity", checks, waited_s + served_s), ("network", network, served_s))
    for cause, mine, seconds in spent:
        spent_s = np.bincount(at[known & mine], seconds[known & mine], minlength=len(ids))
        _put(parts, cause, spent_s)
        total_s += spent_s
    return total_s


def _before_first_token(curves: _Curves, rows: Columns, before_s: np.ndarray) -> np.ndarray:
    parts = np.zeros((len(rows["request_id"]), len(CAUSES)))
    _split_queue(parts, curves, np.minimum(rows["arrival_s"] + before_s, rows["scheduled_s"]), rows["scheduled_s"])
    own_tokens = np.maximum(rows["prompt_tokens"] - rows["cached_tokens"], 1)
    _split_prefill(parts, curves, rows["scheduled_s"], rows["first_token_s"], own_tokens)
    return parts


def _prefill_replica(run: RunData, rows: Columns) -> np.ndarray:
    """The prefill replica whose step ended when each request got its first token (the closest in time, where none did exactly)."""
    steps = run.steps
    mine = np.isin(steps["replica"], run.pools["prefill"]) & (steps["prefill_tokens"] > 0)
    ends, replica = (steps["start_s"] + steps["duration_s"])[mine], steps["replica"][mine]
    if not len(ends):
        raise InputError(str(run.path), "served requests but its prefill replicas recorded no step")
    order = np.argsort(ends, kind="stable")
    ends, replica = ends[order], replica[order]
    after = np.clip(np.searchsorted(ends, rows["first_token_s"]), 0, len(ends) - 1)
    before = np.maximum(after - 1, 0)
    nearer = np.abs(ends[before] - rows["first_token_s"]) < np.abs(ends[after] - rows["first_token_s"])
    return np.where(rows["replica"] < 0, -1, replica[np.where(nearer, before, after)])  # what no replica served has none here either


def rank(attribution: Attribution, quantile: float = 0.99) -> list[Cause]:
    """Rank the causes of the requests at or beyond ``quantile`` by the seconds they added beyond the typical request.

    Typical is the mean of the middle fifth (40th to 60th percentile); excesses add up to the difference of mean latencies.
    """
    whole, parts = attribution.whole_s, attribution.parts_s
    low, high, edge = np.quantile(whole, (0.4, 0.6, quantile))
    slow, middle = whole >= edge, (whole >= low) & (whole <= high)
    typical, mean = parts[middle].mean(axis=0), parts[slow].mean(axis=0)
    excess, total = mean - typical, float(whole[slow].mean() - whole[middle].mean())
    lost = parts[slow] - typical
    ids, main = attribution.request_id[slow], np.argmax(lost, axis=1)
    causes = []
    for index, cause in enumerate(CAUSES):
        held = np.flatnonzero(main == index)
        worst = int(ids[held[np.argmax(lost[held, index])]]) if len(held) else -1
        share = float(excess[index]) / total if total > 0 else 0.0
        causes.append(Cause(cause, LABELS[cause], float(mean[index]), float(typical[index]), float(excess[index]), share, len(held), worst))
    return sorted(causes, key=lambda row: (-row.excess_s, row.cause))


def preempted_seconds(plans: Sequence[Mapping]) -> dict[int, float]:
    """Seconds each request spent between a preemption and the end of the step that completed its recomputed context.

    ``plans`` are rows of plans.parquet, those of one replica in order. A request is back once its last chunk of recomputation commits:
    the step after which its replica gives it no further chunk.
    """
    total: dict[int, float] = {}
    by_replica: dict[int, list[Mapping]] = {}
    for plan in plans:
        by_replica.setdefault(plan["replica"], []).append(plan)
    for own in by_replica.values():
        out_since: dict[int, float] = {}
        last_chunk: dict[int, float] = {}
        for plan in (*own, {"chunks": (), "preempted": ()}):  # the empty plan closes what the last one recomputed
            chunked = {int(chunk["request_id"]) for chunk in plan["chunks"]}
            for request in [request for request in last_chunk if request not in chunked]:
                total[request] = total.get(request, 0.0) + last_chunk.pop(request) - out_since.pop(request)
            last_chunk.update((request, plan["commit_s"]) for request in chunked if request in out_since)
            for request in plan["preempted"]:
                out_since.setdefault(int(request), plan["schedule_s"])
                last_chunk.pop(int(request), None)
    return total


def explain_all(run: RunData, metrics: Sequence[str] = METRICS, quantile: float = 0.99) -> dict[str, list[Cause]]:
    """Ranked causes of the slowest requests by each metric, with exact preemption times where plans were kept."""
    curves, preempted_s = timelines(run), None
    plans = run.path / "plans.parquet"
    if plans.is_file() and (run.requests["preemptions"] > 0).any():
        import pyarrow.parquet as pq

        columns = ["replica", "schedule_s", "commit_s", "chunks", "preempted"]
        preempted_s = preempted_seconds(pq.read_table(plans, columns=columns).to_pylist())
    return {metric: rank(attribute(run, metric, curves=curves, preempted_s=preempted_s), quantile) for metric in metrics}


def explain(run: RunData, metric: str = "e2e_s", quantile: float = 0.99) -> list[Cause]:
    """Ranked causes of the requests at or beyond a quantile of one metric: `rank` of `attribute`."""
    return explain_all(run, (metric,), quantile)[metric]
