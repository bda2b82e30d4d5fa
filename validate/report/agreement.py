"""Two runs against each other: relative differences by percentile, and request by request where both served the same ones."""

from __future__ import annotations

import numpy as np

from validate.report.figure import SERIES, Figure, axis, duration_axis
from validate.report.latency import NAMES, SHORT, ladder_axis, rung, sorted_ms
from validate.run_data import RunData

_QUANTILES = np.concatenate([np.arange(0.05, 0.95, 0.05), [0.95, 0.97, 0.99, 0.995, 0.999]])
_DOTS = 3000


def ordered(first: RunData, second: RunData) -> tuple[RunData, RunData]:
    """Return (base, other): the real run is what a simulated one is measured against, else the first given."""
    return (second, first) if first.simulated and not second.simulated else (first, second)


def differences(base: RunData, other: RunData) -> Figure | None:
    """Relative difference at each percentile; None without records in both."""
    if not base.requests or not other.requests:
        return None
    traces = []
    for metric, colour in zip(("ttft_s", "tpot_s", "e2e_s"), SERIES):
        old, new = sorted_ms(base, metric), sorted_ms(other, metric)
        if len(old) < 2 or len(new) < 2:
            continue
        shown = _QUANTILES[1 - 2 / min(len(old), len(new)) >= _QUANTILES]
        before, after = np.quantile(old, shown), np.quantile(new, shown)
        error = np.divide(after - before, before, out=np.zeros(len(shown)), where=before > 0)
        traces.append({"type": "scatter", "mode": "lines+markers", "name": SHORT[metric], "x": rung(shown).tolist(), "y": error.tolist(), "customdata": (shown * 100).tolist(),
                       "line": {"color": colour, "width": 2}, "marker": {"size": 5}, "hovertemplate": "p%{customdata:.4~f}: %{y:+.1%}<extra></extra>"})  # fmt: skip
    count = min(int(run.completed.sum()) for run in (base, other))
    layout = {"xaxis": ladder_axis(count), "yaxis": axis("", tickformat="+.3~%", rangemode="tozero", zeroline=True, zerolinecolor="$ink", zerolinewidth=1.5)}
    note = f"({other.label} - {base.label}) / {base.label}: zero is perfect agreement."
    return Figure("differences", "Difference by percentile", note, traces, layout, height_px=340)


def _matched(base: RunData, other: RunData) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows of both runs that are the same request (id and prompt length), or None when hardly any are."""
    _, mine, theirs = np.intersect1d(base.requests["request_id"], other.requests["request_id"], return_indices=True)
    same = base.requests["prompt_tokens"][mine] == other.requests["prompt_tokens"][theirs]
    same &= base.completed[mine] & other.completed[theirs]
    return (mine[same], theirs[same]) if same.sum() >= 0.5 * min(len(base.requests["request_id"]), len(other.requests["request_id"])) else None


def pairs(base: RunData, other: RunData, metric: str) -> Figure | None:
    """Each request's latency in both runs; None when they did not serve the same requests."""
    if not base.requests or not other.requests:
        return None
    rows = _matched(base, other)
    if rows is None:
        return None
    kept = np.unique(np.linspace(0, len(rows[0]) - 1, min(len(rows[0]), _DOTS)).astype(int))
    x, y = base.latency_s(metric)[rows[0]][kept] * 1e3, other.latency_s(metric)[rows[1]][kept] * 1e3
    known = (x > 0) & (y > 0)
    x, y, ids = x[known], y[known], base.requests["request_id"][rows[0]][kept][known]
    if not len(x):
        return None
    ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
    dots = {"type": "scatter", "mode": "markers", "name": SHORT[metric], "x": np.round(x, 3).tolist(), "y": np.round(y, 3).tolist(), "text": [str(i) for i in ids],
            "marker": {"size": 5, "color": "$blue", "opacity": 0.45}, "hovertemplate": "request %{text}: %{x:,.1f} → %{y:,.1f} ms<extra></extra>", "showlegend": False}  # fmt: skip
    diagonal = {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "line": {"color": "$grey", "dash": "dash", "width": 1.5}, "hoverinfo": "skip", "showlegend": False}
    layout = {"xaxis": duration_axis(base.label, *ends), "yaxis": duration_axis(other.label, *ends)}
    return Figure(f"pairs-{metric[:-2]}", f"{NAMES[metric]}, request by request", "On the dashed line both runs agree.", [dots, diagonal], layout, height_px=340)
