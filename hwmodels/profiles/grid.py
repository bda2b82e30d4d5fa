"""Linear interpolation on measured grids, and a record of every time a question fell outside them.

Linear and not logarithmic: attention and GEMM times are nearly linear in their sizes, and interpolating their
logarithms was measured to be 3-6 times worse.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np


class ExtrapolationWarning(UserWarning):
    """A latency was asked for outside the measured grid; the answer continues the last measured slope."""


class Extrapolations:
    """Warns once per (grid, axis) and keeps the sentences, so that a run can write them beside its results."""

    def __init__(self) -> None:
        self._widest: dict[tuple[str, str], tuple[float, float]] = {}

    def note(self, grid: str, axis: str, value: float, limit: float) -> None:
        """Record that ``value`` on ``axis`` of ``grid`` lies beyond ``limit``, the last measured point."""
        seen = self._widest.get((grid, axis))
        if seen is None:
            warnings.warn(self._sentence(grid, axis, value, limit), ExtrapolationWarning, stacklevel=3)
        if seen is None or value > seen[0]:
            self._widest[(grid, axis)] = (value, limit)

    def sentences(self) -> list[str]:
        """One sentence per (grid, axis) with the farthest value asked for; empty when all answers were interpolated."""
        return [self._sentence(grid, axis, *self._widest[(grid, axis)]) for grid, axis in sorted(self._widest)]

    @staticmethod
    def _sentence(grid: str, axis: str, value: float, limit: float) -> str:
        return f"{grid}: {axis} = {value:g} lies outside the measured grid (up to {limit:g}); continued with the last measured slope"


def locate(axis: Sequence[float], x: float) -> tuple[int, float]:
    """Return (i, w) so that linear interpolation is (1-w)·y[i] + w·y[i+1]; w = 0 below the axis, w > 1 beyond its end."""
    last = len(axis) - 2
    if last < 0 or x <= axis[0]:
        return 0, 0.0
    i = min(bisect_right(axis, x) - 1, last)
    return i, (x - axis[i]) / (axis[i + 1] - axis[i])


def interpolate(low: float, high: float, weight: float) -> float:
    """Linear interpolation; beyond the end (weight > 1) a falling pair is held, since a larger task is never quicker."""
    if weight > 1.0 and high < low:
        return high
    return low + weight * (high - low)


class Line:
    """Times over one axis. Below the first point the first time holds (a launch has a floor); beyond the last, the slope goes on."""

    def __init__(self, name: str, axis_name: str, xs: Sequence[float], ys: Sequence[float], beyond: Extrapolations) -> None:
        self.name, self.axis_name = name, axis_name
        self.xs, self.ys = [float(x) for x in xs], [float(y) for y in ys]
        self._beyond = beyond

    def at(self, x: float) -> float:
        """Return the interpolated time at ``x``, in the unit of ``ys``."""
        if len(self.xs) == 1:
            return self.ys[0]
        i, weight = locate(self.xs, x)
        if weight > 1.0:
            self._beyond.note(self.name, self.axis_name, x, self.xs[-1])
        return interpolate(self.ys[i], self.ys[i + 1], weight)


def resample(xs: np.ndarray, ys: np.ndarray, onto: np.ndarray, floor: float) -> np.ndarray:
    """Interpolate ``ys`` (first axis over ``xs``) linearly onto ``onto``; beyond the ends the slope goes on, never below ``floor``."""
    if len(xs) == 1:
        return np.repeat(ys, len(onto), axis=0)
    i = np.clip(np.searchsorted(xs, onto, side="right") - 1, 0, len(xs) - 2)
    weight = ((onto - xs[i]) / (xs[i + 1] - xs[i])).reshape(-1, *([1] * (ys.ndim - 1)))
    return np.maximum(ys[i] + weight * (ys[i + 1] - ys[i]), floor)


def fill(points: np.ndarray, values: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Make a full grid of a nested one.

    ``points`` (rows, axes) are the measured coordinates, without duplicates, and ``values`` (rows,) their times.
    Profiles are often a union of two rectangular grids, so the inner axes differ from one outer value to the next. Each
    sub-grid is interpolated, innermost axis first, onto the union of the coordinates, which adds no information within
    its range; beyond it the slope goes on, never below the smallest time of the profile, the floor of a launch.
    Returns the axes and the array over them.
    """
    axes = [np.unique(points[:, k]) for k in range(points.shape[1])]
    floor = float(values.min())

    def level(rows: np.ndarray, k: int) -> np.ndarray:
        coordinates = points[rows, k]
        if k == len(axes) - 1:
            order = np.argsort(coordinates, kind="stable")
            return resample(coordinates[order], values[rows][order], axes[k], floor)
        present = np.unique(coordinates)
        inner = np.stack([level(rows[coordinates == x], k + 1) for x in present])
        return resample(present, inner, axes[k], floor)

    return axes, level(np.arange(len(values)), 0)


class Surface:
    """Times over two axes, both as in ``Line``."""

    def __init__(self, name: str, axis_names: tuple[str, str], points: np.ndarray, values: np.ndarray, beyond: Extrapolations) -> None:
        axes, times = fill(points, values)
        self.name, self.axis_names = name, axis_names
        self.axes = [axis.tolist() for axis in axes]
        self.rows = times.tolist()
        self._beyond = beyond

    def resample_columns(self, onto: np.ndarray) -> None:
        """Give the surface the knots ``onto`` on its second axis, so that surfaces with different gaps can be added up."""
        rows = np.asarray(self.rows)
        self.rows = resample(np.asarray(self.axes[1]), rows.T, onto, float(rows.min())).T.tolist()
        self.axes[1] = onto.tolist()

    def row_at(self, x: float) -> list[float]:
        """Return the times over the second axis at ``x`` on the first."""
        i, weight = self._place(0, x)
        if len(self.rows) == 1:
            return self.rows[0]
        return [interpolate(low, high, weight) for low, high in zip(self.rows[i], self.rows[i + 1])]

    def at(self, x: float, y: float) -> float:
        """Return the bilinear time at (x, y)."""
        i, weight = self._place(0, x)
        j, across = self._place(1, y)
        low, high = self.rows[i], self.rows[i + 1 if len(self.rows) > 1 else i]
        first = interpolate(low[j], high[j], weight)
        return first if len(low) == 1 else interpolate(first, interpolate(low[j + 1], high[j + 1], weight), across)

    def _place(self, k: int, x: float) -> tuple[int, float]:
        axis = self.axes[k]
        i, weight = locate(axis, x)
        if weight > 1.0:
            self._beyond.note(self.name, self.axis_names[k], x, axis[-1])
        return i, weight
