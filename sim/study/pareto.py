"""Operating points: which of them nothing else beats, and the best one under bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def front(points: np.ndarray, smaller_is_better: Sequence[bool]) -> np.ndarray:
    """Mask of the points [n, k] that no other point beats in one respect without losing in another; NaN rows never count.

    Equal points are all kept. O(n^2) comparisons in vectorised rows: studies have thousands of points, not millions.
    """
    cost = np.where(np.asarray(smaller_is_better), points, -points).astype(float)
    known = np.isfinite(cost).all(axis=1)
    kept = known.copy()
    others = cost[known]
    for row in np.flatnonzero(known):
        beaten = ((others <= cost[row]).all(axis=1) & (others < cost[row]).any(axis=1)).any()
        kept[row] = not beaten
    return kept


def select(
    columns: Mapping[str, np.ndarray], best: str, *, smaller_is_better: bool, bounds: Mapping[str, tuple[float, float]]
) -> int | None:
    """Index of the point with the best ``best`` among those whose columns lie within ``bounds`` (low, high; ends included).

    Returns None when no point satisfies the bounds: the shortage is the answer. Ties go to the earlier point.
    """
    values = np.asarray(columns[best], dtype=float)
    allowed = np.isfinite(values)
    for name, (low, high) in bounds.items():
        column = np.asarray(columns[name], dtype=float)
        allowed &= (column >= low) & (column <= high)
    if not allowed.any():
        return None
    return int(np.argmin(np.where(allowed, values if smaller_is_better else -values, np.inf)))


def balanced(points: np.ndarray, smaller_is_better: Sequence[bool]) -> int:
    """Index of the point nearest to the best of every column at once, each column scaled to its range."""
    cost = np.where(np.asarray(smaller_is_better), points, -points).astype(float)
    low, high = cost.min(axis=0), cost.max(axis=0)
    spread = np.where(high > low, high - low, 1.0)
    return int(np.argmin((((cost - low) / spread) ** 2).sum(axis=1)))
