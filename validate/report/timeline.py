"""What the fleet did over time: queue, batch, KV use, load and power by replica or pool, and a slice of requests as a Gantt chart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from validate.report import changes
from validate.report.figure import SERIES, Figure, axis, line, packed
from validate.run_data import Columns, RunData, find

BINS = 480
LINES = 4  # replicas drawn one by one; a larger fleet is drawn as its mean between its least and most loaded replica
GANTT_REQUESTS = 48
_STRIP_POINTS = 1500


class Panel(NamedTuple):
    """One quantity over time: its values [groups, bins], and its exact peaks by bin where a mean would hide them."""

    title: str
    values: np.ndarray
    peaks: np.ndarray | None = None
    tickformat: str = ",~g"
    limit: float | None = None


def _by_replica(run: RunData) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each replica and its rows of steps in order of their start."""
    order = np.lexsort((run.steps["start_s"], run.steps["replica"]))
    replicas, starts = np.unique(run.steps["replica"][order], return_index=True)
    yield from zip(replicas.tolist(), np.split(order, starts[1:]))


def binned_mean(start_s: np.ndarray, duration_s: np.ndarray, values: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """Time-weighted mean per bin of a quantity that holds ``values`` during steps and zero between them.

    Exact however steps and bins overlap: differences of the interpolated integral. Steps of one replica, in order.
    """
    times = np.stack([start_s, start_s + duration_s], axis=1).ravel()
    integral = np.zeros(len(times))
    integral[1::2] = values * duration_s
    return np.diff(np.interp(edges_s, np.maximum.accumulate(times), integral.cumsum())) / np.diff(edges_s)


def waiting(arrival_s: np.ndarray, scheduled_s: np.ndarray, edges_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and peak number of requests waiting in each bin, from when each arrived and was scheduled."""

    def elapsed(sorted_s: np.ndarray) -> np.ndarray:  # sum of max(0, t - x) at each edge
        count = np.searchsorted(sorted_s, edges_s, side="right")
        return edges_s * count - np.concatenate(([0.0], sorted_s.cumsum()))[count]

    arrivals, leaves = np.sort(arrival_s), np.sort(scheduled_s)
    mean = np.diff(elapsed(arrivals) - elapsed(leaves)) / np.diff(edges_s)
    after = np.arange(1, len(arrivals) + 1) - np.searchsorted(leaves, arrivals, side="right")
    bins = np.clip(np.searchsorted(edges_s, arrivals, side="right") - 1, 0, len(edges_s) - 2)
    peak = np.searchsorted(arrivals, edges_s[:-1], side="right") - np.searchsorted(leaves, edges_s[:-1], side="right")
    np.maximum.at(peak, bins, after)
    return np.maximum(mean, 0.0), peak


def _peaks(start_s: np.ndarray, values: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    bounds = np.searchsorted(start_s, edges_s)
    peak = np.zeros(len(edges_s) - 1)
    filled = bounds[1:] > bounds[:-1]
    if filled.any():
        peak[filled] = np.maximum.reduceat(values, bounds[:-1][filled])
    return peak


def kv_blocks(run: RunData) -> float | None:
    """Usable KV blocks of one replica: as configured, or from the fullest moment in blocks and as a fraction."""
    configured = find(run.scenario, "kv_cache.blocks")
    if configured:
        return float(configured)
    fullest, used = find(run.summary, "kv_utilisation.max"), float(run.steps["kv_blocks_used"].max(initial=0))
    return used / fullest if fullest else None


def _end_s(run: RunData) -> float:
    return max(float(run.summary.get("duration_s") or 0), float((run.steps["start_s"] + run.steps["duration_s"]).max(initial=0)), 1e-9)


def panels(run: RunData) -> tuple[list[str], np.ndarray, list[Panel]]:
    """Return the names of replicas (or pools, as means over theirs), bin edges in seconds, and the quantities over time."""
    steps, blocks = run.steps, None if run.pools else kv_blocks(run)
    edges = np.linspace(0.0, _end_s(run), min(BINS, max(40, len(steps["step"]) // 4)) + 1)
    found: dict[int, dict[str, np.ndarray]] = {}
    for replica, rows in _by_replica(run):
        start, duration = steps["start_s"][rows], steps["duration_s"][rows]
        used = steps["kv_blocks_used"][rows] / (blocks or 1.0)
        rate = np.divide(steps["prefill_tokens"][rows], duration, out=np.zeros(len(rows)), where=duration > 0)
        held = {"batch": steps["decode_seqs"][rows] + steps["prefill_seqs"][rows], "kv": used, "busy": np.ones(len(rows)), "tokens": rate}
        if "power_w" in steps:
            held["power"] = steps["power_w"][rows]
        found[replica] = {key: binned_mean(start, duration, values, edges) for key, values in held.items()}
        found[replica]["kv_peak"] = _peaks(start, used, edges)
        served = (run.requests["replica"] == replica) if run.requests and not run.pools else np.zeros(0, bool)
        found[replica]["queue"], found[replica]["queue_peak"] = waiting(*_waits(run.requests, served), edges)
    names, got = _pooled(run, found, edges) if run.pools else _each(found)
    kv_title, kv_format = ("KV use", ".0%") if blocks else ("KV blocks", ",~g")
    shown = [
        Panel("waiting", got["queue"], got["queue_peak"]),
        Panel("batch", got["batch"], limit=find(run.scenario, "policy.batching.max_batch_seqs")),
        Panel(kv_title, got["kv"], got["kv_peak"], kv_format, 1.0 if blocks else None),
        Panel("busy", np.minimum(got["busy"], 1.0), None, ".0%"),
        Panel("prefill tok/s", got["tokens"], None, "~s"),
    ]
    return names, edges, shown + ([Panel("power, W", got["power"])] if "power" in got else [])


def _each(found: dict[int, dict[str, np.ndarray]]) -> tuple[list[str], dict[str, np.ndarray]]:
    keys = next(iter(found.values()))
    return [f"replica {replica}" for replica in found], {key: np.array([values[key] for values in found.values()]) for key in keys}


def _pooled(run: RunData, found: dict[int, dict[str, np.ndarray]], edges: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
    """Means over the replicas of each pool (peaks: the highest). All that wait for their prompt wait before the prefill pool."""
    names, got = [], {}
    for role, replicas in run.pools.items():
        mine = [found[replica] for replica in replicas if replica in found]
        if not mine:
            continue
        names.append(f"{role} pool")
        for key in mine[0]:
            stack = np.array([values[key] for values in mine])
            got.setdefault(key, []).append(stack.max(axis=0) if key.endswith("peak") else stack.mean(axis=0))
        if role == "prefill" and run.requests:
            got["queue"][-1], got["queue_peak"][-1] = waiting(*_waits(run.requests, np.ones(len(run.requests["arrival_s"]), bool)), edges)
    return names, {key: np.array(values) for key, values in got.items()}


def _waits(requests: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not rows.any():
        return np.empty(0), np.empty(0)
    arrival, scheduled = requests["arrival_s"][rows], requests["scheduled_s"][rows]
    known = np.isfinite(scheduled)
    return arrival[known], scheduled[known]


def _traces(names: list[str], x: dict, panel: Panel, ref: str, first: bool) -> list[dict]:
    hover = f"%{{y:{panel.tickformat}}}"
    shared = {"yaxis": f"y{ref}", "xaxis": "x", "hovertemplate": hover}
    if len(names) <= LINES:
        return [
            line(name, x, packed(values), SERIES[i], width=1.6, legendgroup=name, showlegend=first, **shared)
            for i, (name, values) in enumerate(zip(names, panel.values))
        ]
    low, high = panel.values.min(axis=0), panel.values.max(axis=0)
    band = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "yaxis": f"y{ref}", "xaxis": "x", "type": "scatter", "mode": "lines"}
    return [
        {**band, "x": x, "y": packed(low), "name": "least"},
        {**band, "x": x, "y": packed(high), "name": f"range of {len(names)} replicas", "fill": "tonexty", "fillcolor": "$blue-wash",
         "showlegend": first, "legendgroup": "range"},
        line("mean", x, packed(panel.values.mean(axis=0)), "$blue", legendgroup="mean", showlegend=first, **shared),
    ]  # fmt: skip


def series(run: RunData) -> Figure:
    """Stacked time series that zoom together."""
    names, edges, shown = panels(run)
    service = changes.in_service(run)
    count = len(shown) + (service is not None)
    middle, gap = packed((edges[1:] + edges[:-1]) / 2, exact=True), 0.045
    height = (1 - gap * (count - 1)) / count
    traces, layout = [], {"xaxis": axis("seconds since the start", anchor=f"y{count}" if count > 1 else "y"), "hovermode": "x unified", "shapes": changes.marks(run)}
    for index, panel in enumerate(shown):
        ref = "" if index == 0 else str(index + 1)
        top = 1 - index * (height + gap)
        layout[f"yaxis{ref}"] = axis(panel.title, domain=[max(0.0, top - height), top], tickformat=panel.tickformat, rangemode="tozero", nticks=4)
        traces += _traces(names, middle, panel, ref, index == 0)
        if panel.peaks is not None:
            peak = panel.peaks.max(axis=0)
            traces.append(line("peak", middle, packed(peak), "$grey", dash="dot", width=1, yaxis=f"y{ref}", xaxis="x", legendgroup="peak",
                               showlegend=index == 0, hovertemplate=f"%{{y:{panel.tickformat}}}"))  # fmt: skip
            reached = peak.max() if panel.limit is None else min(panel.limit, peak.max())
            layout[f"yaxis{ref}"]["range"] = [0, max(float(reached) * 1.08, 1e-9)]
    if service is not None:
        steps = line("replicas in service", packed(service[0], exact=True), packed(service[1]), "$ink", width=1.6, yaxis=f"y{count}", xaxis="x", hovertemplate="%{y:.0f}")
        traces.append({**steps, "line": {**steps["line"], "shape": "hv"}, "showlegend": False})
        layout[f"yaxis{count}"] = axis("in service", domain=[0.0, height], rangemode="tozero", nticks=4, tickformat=",d")
    note = f"Means over {edges[1]:.3g} s; dotted: the highest moment of any replica within them. Drag to zoom all at once."
    return Figure("series", "Queue, batch, KV use and load over time", note, traces, layout, height_px=110 + 118 * count, wide=True)


def _slice(run: RunData) -> tuple[np.ndarray, int]:
    """Rows of the requests around the one whose first token took longest, on its replica, in order of arrival; and that row."""
    rows = run.requests
    ttft = np.where(run.completed, run.latency_s("ttft_s"), -np.inf)
    slowest = int(np.argmax(ttft))
    mine = np.flatnonzero(run.completed & (rows["replica"] == rows["replica"][slowest]))
    mine = mine[np.argsort(rows["arrival_s"][mine], kind="stable")]
    at = int(np.flatnonzero(mine == slowest)[0])
    first = max(0, min(at - GANTT_REQUESTS * 2 // 3, len(mine) - GANTT_REQUESTS))
    return mine[first : first + GANTT_REQUESTS], slowest


def _strip(run: RunData, replica: int, start_s: float, end_s: float) -> dict | None:
    """Step durations of the replica over the slice, the longest of each stretch where there are too many."""
    steps = run.steps
    mine = np.flatnonzero((steps["replica"] == replica) & (steps["start_s"] < end_s) & (steps["start_s"] + steps["duration_s"] > start_s))
    if not len(mine):
        return None
    mine = mine[np.argsort(steps["start_s"][mine], kind="stable")]
    each_ms = steps["duration_s"][mine] / steps["steps"][mine] * 1e3
    starts = np.arange(0, len(mine), max(1, len(mine) // _STRIP_POINTS))
    longest = np.maximum.reduceat(each_ms, starts)
    since, until = steps["start_s"][mine], steps["start_s"][mine] + steps["duration_s"][mine]
    ends = np.append(until[starts[1:] - 1], until[-1])  # a stretch that ends before the next begins leaves the replica idle: zero
    x, y = np.stack([since[starts], ends], axis=1).ravel(), np.stack([longest, np.zeros(len(starts))], axis=1).ravel()
    shown = np.ones(len(x), bool)
    shown[1:-1:2] = since[starts[1:]] - ends[:-1] > 1e-6
    hover = "step of %{y:.1f} ms<extra></extra>"
    trace = line("step time", packed(x[shown], exact=True), packed(y[shown]), "$grey", width=1, yaxis="y2", xaxis="x", hovertemplate=hover)
    return {**trace, "line": {"color": "$grey", "width": 1, "shape": "hv"}, "showlegend": False}


def gantt(run: RunData) -> Figure | None:
    """Requests around the slowest first token as bars of queue, prefill and decode; None when nothing completed."""
    if not run.completed.any():
        return None
    chosen, slowest = _slice(run)
    rows = run.requests
    y = packed(np.arange(len(chosen)))
    phases = (("queue", "arrival_s", "scheduled_s", "$orange"), ("prefill", "scheduled_s", "first_token_s", "$vermillion"), ("decode", "first_token_s", "finish_s", "$blue"))
    hover = "request %{customdata[0]}: %{x:.3f} s of %{fullData.name}<br>%{customdata[1]:,} in, %{customdata[2]:,} out, %{customdata[3]}<extra></extra>"
    facts = [[int(rows["request_id"][i]), int(rows["prompt_tokens"][i]), int(rows["output_tokens"][i]), str(rows["class"][i])] for i in chosen]
    data = [
        {"type": "bar", "orientation": "h", "name": name, "y": y, "base": packed(rows[since][chosen], exact=True), "customdata": facts,
         "x": packed(rows[until][chosen] - rows[since][chosen]), "marker": {"color": colour, "line": {"width": 0}}, "hovertemplate": hover}
        for name, since, until, colour in phases
    ]  # fmt: skip
    replica = int(rows["replica"][slowest])
    start, end = float(rows["arrival_s"][chosen].min()), float(rows["finish_s"][chosen].max())
    strip = _strip(run, replica, start, end) if run.steps else None
    at = int(np.flatnonzero(chosen == slowest)[0])
    layout = {
        "barmode": "overlay", "bargap": 0.25, "xaxis": axis("seconds since the start", anchor="y2" if strip else "y", range=[start, end]),
        "yaxis": axis("request", autorange="reversed", domain=[0.24 if strip else 0, 1], showgrid=False, tickvals=[at],
                      ticktext=[str(int(rows["request_id"][slowest]))]),
        "yaxis2": axis("step, ms", domain=[0, 0.18], rangemode="tozero", nticks=3),
    }  # fmt: skip
    note = f"The neighbours of request {int(rows['request_id'][slowest])}, whose first token took longest, on replica {replica}" + (
        "; below, how long that replica's steps took." if strip else "."
    )
    return Figure("gantt", "A slice of requests", note, data + ([strip] if strip else []), layout, height_px=560, wide=True)


def attainment(run: RunData) -> Figure | None:
    """SLO attainment by class as bars against the goal; None when the run had no objectives."""
    attained = run.summary["slo_attainment"]
    met = {name: share for name, share in attained["by_class"].items() if share is not None}
    if not met or not find(run.scenario, "slo"):
        return None
    if len(met) > 1:
        met["all"] = attained["overall"]
    goal = find(run.scenario, "slo.attainment")
    tall = [goal is None or share >= goal for share in met.values()]
    names = [f"{name}  {share:.2%}" + ("" if goal is None else " \u2713" if good else " \u2717") for (name, share), good in zip(met.items(), tall)]
    bars = {"type": "bar", "orientation": "h", "y": names, "x": list(met.values()), "hovertemplate": "%{x:.3%}<extra></extra>", "showlegend": False,
            "marker": {"color": ["$blue" if good else "$vermillion" for good in tall]}}  # fmt: skip
    layout = {"xaxis": axis("share of requests that met all their objectives", tickformat=".0%", range=[0, 1.005]), "bargap": 0.35,
              "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"}}  # fmt: skip
    if goal:
        at = {"x0": goal, "x1": goal, "y0": 0, "y1": 1, "yref": "paper"}
        layout["shapes"] = [{"type": "line", **at, "line": {"color": "$ink", "width": 1.5, "dash": "dash"}}]
        layout["annotations"] = [{"x": goal, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "right", "showarrow": False, "text": f"goal {goal * 100:.4g}%"}]
        layout["margin"] = {"t": 22, "l": 40, "r": 18, "b": 40}
    return Figure("slo", "SLO attainment by class", "", [bars], layout, height_px=110 + 36 * len(names), wide=True)
