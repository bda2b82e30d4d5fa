"""Latency distributions: percentile ladders that give the tail its room, and cumulative curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from validate.report.figure import DASHES, SERIES, Figure, axis, duration_axis, line, packed, rule
from validate.run_data import RunData, find

NAMES = {"ttft_s": "Time to first token", "tpot_s": "Time per output token", "e2e_s": "End to end", "queue_s": "Queueing"}
SHORT = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "queue_s": "Queue"}
COLOURS = dict(zip(NAMES, SERIES))
_RUNGS = (0.5, 0.9, 0.99, 0.999, 0.9999)
_POINTS = 220
_FLOOR_MS = 1e-2  # what a log axis shows as zero: a request that did not queue


def sorted_ms(run: RunData, metric: str) -> np.ndarray:
    """Return the metric of the completed requests in ascending milliseconds."""
    values = run.latency_s(metric)[run.completed]
    return np.sort(values[np.isfinite(values)]) * 1e3


def rung(quantile: np.ndarray | float) -> np.ndarray:
    """Where a percentile stands on the ladder: each further nine is as wide as the one before."""
    return -np.log10(1 - np.asarray(quantile))


def _quantiles(count: int) -> np.ndarray:
    """Ladder positions from p10 to the last percentile that at least one request lies beyond."""
    last = rung(1 - 1 / max(count, 2))
    return 1 - 10 ** -np.linspace(rung(0.1), last, _POINTS)


def ladder_axis(count: int) -> dict:
    """Axis of percentiles up to the last that ``count`` requests resolve."""
    shown = [q for q in _RUNGS if count * (1 - q) >= 0.99] or [0.5]
    return axis("percentile", tickvals=[float(rung(q)) for q in shown], ticktext=[f"p{100 * q:g}" for q in shown], zeroline=False)


def _ladder_trace(name: str, values: np.ndarray, colour: str, dash: str = "solid") -> dict:
    quantiles = _quantiles(len(values))
    reached = np.maximum(np.quantile(values, quantiles), _FLOOR_MS)
    hover = "%{y:,.4~g} ms at p%{customdata:.4~f}<extra>" + name + "</extra>"
    return line(name, packed(rung(quantiles)), packed(reached), colour, dash=dash, customdata=packed(quantiles * 100), hovertemplate=hover)


def _ladders(count: int, spans: Sequence[np.ndarray], *, goals: Sequence[float] = ()) -> dict:
    """Layout of a ladder whose time axis spans p10 to the maximum of what is drawn, and the objectives."""
    low = min(float(np.quantile(values, 0.1)) for values in spans)
    high = max(float(values.max()) for values in spans)
    return {"xaxis": ladder_axis(count), "yaxis": duration_axis("", *(max(_FLOOR_MS, end) for end in (min(low, *goals, high), max(low, *goals, high))))}


def ladder(run: RunData) -> Figure:
    """Percentile ladder of every latency of one run."""
    spans = {metric: values for metric in NAMES if len(values := sorted_ms(run, metric))}
    traces = [_ladder_trace(SHORT[metric], values, COLOURS[metric]) for metric, values in spans.items()]
    layout = _ladders(max(map(len, spans.values())), list(spans.values()))
    return Figure("ladder", "Percentile ladder", "Each further nine takes the same room: the tail is readable. Lower is better.", traces, layout)


def cumulative(run: RunData) -> Figure:
    """Cumulative distribution of every latency of one run, on a logarithmic time axis."""
    traces, ends = [], []
    for metric in NAMES:
        values = np.maximum(sorted_ms(run, metric), _FLOOR_MS)
        if not len(values):
            continue
        at = np.unique(np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int))
        hover = "%{y:.1%} within %{x:,.4~g} ms<extra>" + SHORT[metric] + "</extra>"
        traces.append(line(SHORT[metric], packed(values[at]), packed((at + 1) / len(values)), COLOURS[metric], hovertemplate=hover))
        ends += [float(values[len(values) // 200]), float(values[-1])]
    layout = {"xaxis": duration_axis("", min(ends), max(ends)), "yaxis": axis("share of requests", tickformat=".0%", range=[0, 1.01])}
    return Figure("cdf", "Cumulative distribution", "The share of requests that were served within a time.", traces, layout)


def slo_ms(run: RunData, metric: str, class_name: str = "") -> float | None:
    """Return the objective of a class (or the default one) for ``ttft_s``, ``tpot_s`` or ``e2e_s``, in ms."""
    key = metric.replace("_s", "_ms")
    return find(run.scenario, f"slo.classes.{class_name}.{key}", find(run.scenario, f"slo.default.{key}"))


def _one_goal(run: RunData, metric: str, classes: Sequence[str]) -> bool:
    return len({slo_ms(run, metric, name) for name in classes}) == 1


def by_class(run: RunData, metric: str) -> Figure | None:
    """Percentile ladder of one metric by class with each class's objective; None when there is one class only."""
    classes = sorted(set(run.requests["class"]))
    if len(classes) < 2:
        return None
    traces, rules, spans, goals = [], [], [], []
    values, done = run.latency_s(metric) * 1e3, run.completed
    for index, name in enumerate(classes[: len(SERIES)]):
        mine = values[done & (run.requests["class"] == name)]
        mine = mine[np.isfinite(mine)]
        if len(mine) < 2:
            continue
        spans.append(mine)
        traces.append(_ladder_trace(str(name), mine, SERIES[index], DASHES[index // 4]))
        goal = slo_ms(run, metric, name)
        if goal is not None and np.isfinite(goal):
            shared = goal in goals
            goals.append(goal)
            if not shared:
                rules.append(rule(goal, "SLO" if _one_goal(run, metric, classes) else f"{name} SLO", colour=SERIES[index]))
    if not spans:
        return None
    layout = {**_ladders(max(map(len, spans)), spans, goals=goals), "shapes": rules}
    note = "Dashed: the objective of each class." if rules else ""
    return Figure(f"class-{metric[:-2]}", f"{NAMES[metric]} by class", note, traces, layout, height_px=320)


def overlay(runs: Sequence[RunData], metric: str) -> Figure | None:
    """Percentile ladders of one metric of several runs; None when none has records."""
    traces, spans = [], []
    for index, run in enumerate(runs):
        values = sorted_ms(run, metric) if run.requests else np.empty(0)
        if len(values) >= 2:
            spans.append(values)
            traces.append(_ladder_trace(run.label, values, SERIES[index % len(SERIES)], DASHES[index % len(DASHES)]))
    if not traces:
        return None
    layout = _ladders(max(map(len, spans)), spans)
    return Figure(f"overlay-{metric[:-2]}", NAMES[metric], "", traces, layout, height_px=320)
