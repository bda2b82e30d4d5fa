"""Operating points of the fleets that were found: the front of cost, throughput and latency, and of quality where it is scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from serving.scenario.planning import Select
from sim.study.pareto import balanced, front, select

_SMALLER = {"quality": False, "output_tokens_per_s": False, "e2e_p99_s": True, "ttft_p99_s": True, "tpot_p99_s": True, "cost_per_hour_usd": True}
_WORDS = {"quality": "quality {:.4g}", "output_tokens_per_s": "{:,.0f} output tokens/s saturated", "e2e_p99_s": "E2E p99 {:.3g} s", "ttft_p99_s": "TTFT p99 {:.3g} s",
          "tpot_p99_s": "TPOT p99 {:.3g} s", "cost_per_hour_usd": "${:,.2f} an hour"}  # fmt: skip


def operating_points(rows: Sequence[dict[str, Any]], chosen: Select | None) -> dict[str, dict[str, Any]]:
    """Named points among the feasible ``rows``; each row learns whether it lies ``on_front``.

    The front is of (quality, throughput, latency) where the plan scores quality, else of (cost, throughput, latency).
    ``selected`` is the best under the plan's bounds; it is there with ``row`` null when nothing lies within them.
    """
    feasible = [row for row in rows if row["feasible"]]
    if not feasible:
        return {}
    scored = all(row["quality"] is not None for row in feasible)
    axes = ["quality" if scored else "cost_per_hour_usd", "output_tokens_per_s", "e2e_p99_s"]
    columns = {name: np.array([math.nan if row[name] is None else row[name] for row in feasible], dtype=float) for name in _SMALLER}
    points, smaller = np.stack([columns[name] for name in axes], axis=1), [_SMALLER[name] for name in axes]
    on_front = front(points, smaller)
    for row, kept in zip(feasible, on_front):
        row["on_front"] = bool(kept)
    named: dict[str, dict[str, Any]] = {}
    best = np.flatnonzero(on_front)
    if len(best) > 1:
        named["balanced"] = _point(feasible, int(best[balanced(points[best], smaller)]), axes, "balanced")
        for name, label in zip(axes, ("accuracy first" if scored else "cheapest", "most throughput", "lowest latency")):
            at = select({each: columns[each] for each in axes}, name, smaller_is_better=_SMALLER[name], bounds={})
            named[label.replace(" ", "_")] = _point(feasible, at, axes, label)
    if chosen is not None:
        bounds = {name: (-math.inf if bound.min is None else bound.min, math.inf if bound.max is None else bound.max) for name, bound in chosen.bounds.items()}
        at = select(columns, chosen.best, smaller_is_better=_SMALLER[chosen.best], bounds=bounds)
        named["selected"] = _point(feasible, at, axes, f"best {chosen.best} with {_limits(bounds)}")
    return named


def _limits(bounds: Mapping[str, tuple[float, float]]) -> str:
    ends = [f"{name} at {word} {end:g}" for name, pair in bounds.items() for word, end in zip(("least", "most"), pair) if math.isfinite(end)]
    return " and ".join(ends) or "no bounds"


def _point(feasible: Sequence[Mapping[str, Any]], at: int | None, axes: Sequence[str], label: str) -> dict[str, Any]:
    if at is None:
        return {"config": None, "words": f"{label}: no fleet that was found lies within these bounds"}
    row = feasible[at]
    figures = {name: row[name] for name in axes}
    words = ", ".join(_WORDS[name].format(value) for name, value in figures.items() if value is not None)
    return {"config": row["config"], **figures, "words": f"{label}: {row['name']} ({words})"}
