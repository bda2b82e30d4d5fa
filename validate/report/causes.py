"""The spike attribution as a chart: typical requests beside the slowest ones, split by cause."""

from __future__ import annotations

from validate.explain import CAUSES, LABELS, Cause
from validate.report.figure import Figure, axis
from validate.report.latency import SHORT

COLOURS = {
    "stage_queue": "$sand", "stage": "$teal", "integrity": "$moss", "network": "$indigo",
    "queue": "$orange", "prefill": "$sky", "decode": "$blue", "prefill_interference": "$vermillion", "preemption": "$purple",
    "transfer": "$green", "graph_miss": "$olive", "host_stall": "$grey", "clock": "$rose", "cold_start": "$ink",
}  # fmt: skip


def chart(causes: dict[str, list[Cause]]) -> Figure:
    """Two bars per metric, each its own 100 %: where a typical request spends its time and where a slow one does."""
    labels = [f"{SHORT[metric]} {who}" for metric in causes for who in ("typical", "slowest")]
    totals = {metric: (sum(row.typical_s for row in rows) or 1.0, sum(row.mean_s for row in rows) or 1.0) for metric, rows in causes.items()}
    found = {metric: {row.cause: row for row in rows} for metric, rows in causes.items()}
    data = []
    for cause in CAUSES:
        shares, seconds = [], []
        for metric in causes:
            row, (typical, slow) = found[metric][cause], totals[metric]
            shares += [row.typical_s / typical, row.mean_s / slow]
            seconds += [row.typical_s * 1e3, row.mean_s * 1e3]
        if max(shares) >= 0.002:
            data.append(
                {"type": "bar", "orientation": "h", "name": LABELS[cause], "y": labels, "x": shares, "customdata": seconds,
                 "marker": {"color": COLOURS[cause]}, "hovertemplate": "%{customdata:,.1f} ms (%{x:.0%})<extra>" + LABELS[cause] + "</extra>"}
            )  # fmt: skip
    layout = {"barmode": "stack", "bargap": 0.3, "xaxis": axis("share of the latency", tickformat=".0%", range=[0, 1]),
              "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"}}  # fmt: skip
    note = "Typical: the middle fifth of requests. Slowest: those at or beyond p99. Parts add up to each latency."
    return Figure("causes", "Where the time goes", note, data, layout, height_px=380, wide=True)
