"""One figure of a measured run beside the simulator's: what every kind of measured data yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

NOTHING = "nothing"
STATISTICS = ("mean", "p50", "p90", "p99")
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One statistic of one measured run: real and simulated value, error = (simulated - real)/real, and what was fitted on what.

    ``dataset`` is the name of the data; of a table with many rows it is ``table/part/row``, and rows of a part belong together.
    """

    dataset: str
    engine: str
    latency_model: str
    metric: str
    statistic: str
    real: float
    simulated: float
    error: float
    fitted_on: str


def row(dataset: str, engine: str, latency_model: str, metric: str, statistic: str, real: float, simulated: float, fitted_on: str) -> Row:
    """Return the row of two values; the error follows from them."""
    return Row(dataset, engine, latency_model, metric, statistic, real, simulated, (simulated - real) / real, fitted_on)


def statistics(values: np.ndarray) -> list[float]:
    """Mean and percentiles in the order of ``STATISTICS``."""
    return [float(values.mean()), *(float(value) for value in np.percentile(values, [50, 90, 99]))]
