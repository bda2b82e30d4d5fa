"""Plotly figures as plain data: axes and traces that the page colours by theme.

Colours are tokens ("$blue") that the page resolves, so that one figure serves light, dark and paper. Arrays travel as base64 of
their bytes, which plotly.js reads natively: a third of the size of decimal text, and built without a Python loop.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SERIES = ("$blue", "$orange", "$green", "$vermillion", "$purple", "$sky", "$olive", "$grey")  # Okabe and Ito's, by theme
DASHES = ("solid", "dot", "dash", "dashdot")


class Figure(NamedTuple):
    """One chart with its heading; ``note`` is a sentence that says how to read it, ``height_px`` its height on a wide screen."""

    key: str
    title: str
    note: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height_px: int = 360
    wide: bool = False


def packed(values: Sequence[float] | np.ndarray, *, exact: bool = False) -> dict[str, str]:
    """Return an array as plotly.js's typed-array form: float32, or float64 when ``exact`` (times late in a long run)."""
    array = np.ascontiguousarray(values, dtype="<f8" if exact else "<f4")
    return {"dtype": "f8" if exact else "f4", "bdata": base64.b64encode(array.tobytes()).decode("ascii")}


def axis(title: str, **options: Any) -> dict[str, Any]:
    """Return an axis with its title; options as plotly names them."""
    return {"title": {"text": title, "standoff": 8}, **options}


def line(name: str, x: Any, y: Any, colour: str, *, dash: str = "solid", width: float = 2, **options: Any) -> dict[str, Any]:
    """Return a line trace. ``options`` may add hover templates or another axis."""
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": {"color": colour, "dash": dash, "width": width}, **options}


def rule(value: float, text: str, *, colour: str = "$vermillion") -> dict[str, Any]:
    """Return a horizontal reference line across the plot, labelled at its end (an SLO)."""
    label = {"text": text, "textposition": "end", "yanchor": "bottom", "font": {"color": colour, "size": 11}}
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value, "line": {"color": colour, "width": 1.5, "dash": "dash"}, "label": label}


def duration_axis(title: str, low_ms: float, high_ms: float) -> dict[str, Any]:
    """Return a logarithmic axis for durations given in ms, labelled in words (10 us, 5 ms, 2 s) that no prefix can confuse."""
    low, high = math.log10(low_ms), math.log10(max(high_ms, low_ms * 1.01))
    room = 0.04 * (high - low) + 0.02
    shown = [low - room, high + 2 * room]
    if high - low < 0.5:
        ticks = _even_ticks(10 ** shown[0], 10 ** shown[1])
        return axis(title, type="log", range=shown, tickvals=ticks, ticktext=[_in_words(tick) for tick in ticks], zeroline=False)
    digits = (1, 1.5, 2, 3, 5, 7) if high - low < 0.9 else (1, 2, 5) if high - low < 2.0 else (1,)
    ticks = [digit * 10.0**decade for decade in range(math.floor(low) - 1, math.ceil(high) + 1) for digit in digits]
    return axis(title, type="log", range=shown, tickvals=ticks, ticktext=[_in_words(tick) for tick in ticks], zeroline=False)


def _even_ticks(low: float, high: float) -> list[float]:
    """Three to six round values at even distances: what a range within half a decade can be read by."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _in_words(value_ms: float) -> str:
    for unit, scale in (("s", 1e3), ("ms", 1.0), ("µs", 1e-3)):
        if value_ms >= 0.999 * scale:
            return f"{value_ms / scale:,.4g} {unit}"
    return f"{value_ms * 1e6:.4g} ns"
