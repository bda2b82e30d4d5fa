"""What unequal decode lengths cost: attention waits for the longest sequence to a measured extent.

    t = t(n, mean) + alpha(n, r) * [t(n, longest) - t(n, mean)]

``n`` decodes, ``r`` the share of them longer than (longest + mean)/2. ``alpha`` comes from skew.csv, whose own times
were taken with another timer than attention.csv's and are not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hwmodels.profiles.columns import read_columns
from hwmodels.profiles.grid import locate
from serving.errors import InputError


class Skew:
    """Medians of alpha per (mixed with a prefill chunk?, n, r).

    ``split_limit`` is the batch from which the attention kernel no longer splits one sequence's KV over several blocks,
    0.8 x 2 x SMs / KV heads of the rank (the heuristic of FlashAttention's decode kernel). Alpha jumps there, so it is
    never interpolated across it.
    """

    def __init__(self, path: Path, *, split_limit: float) -> None:
        table = read_columns(path, axes=("n", "ratio"), times=(), words=("regime",), signed=("alpha",))
        self.split_limit = split_limit
        self._cache: dict[tuple[bool, int, int], float] = {}
        known = ~np.isnan(table.numbers["alpha"])  # blank where the longest cost no more than the mean
        mixed = np.array([word == "mixed" for word in table.words["regime"]])
        self._medians = {flag: _medians(table.numbers, known & (mixed == flag)) for flag in (False, True)}
        for flag, medians in self._medians.items():
            if not medians:
                raise InputError(str(path), f"column 'regime' has no '{'mixed' if flag else 'pure'}' rows")

    def alpha(self, mixed: bool, decodes: int, above: int) -> float:
        """Return alpha for ``decodes`` sequences of which ``above`` are longer than (longest + mean)/2."""
        key = (mixed, decodes, above)
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = self._interpolated(mixed, decodes, above / decodes)
        return known

    def _interpolated(self, mixed: bool, decodes: int, ratio: float) -> float:
        medians = self._medians[mixed]
        split = decodes < self.split_limit
        sizes = [n for n in medians if (n < self.split_limit) == split] or list(medians)
        alphas = [float(np.interp(ratio, *medians[n])) for n in sizes]
        if len(sizes) == 1:
            return alphas[0]
        i, weight = locate(sizes, decodes)
        return alphas[i] + min(weight, 1.0) * (alphas[i + 1] - alphas[i])


def _medians(numbers: dict[str, np.ndarray], rows: np.ndarray) -> dict[int, tuple[list[float], list[float]]]:
    result = {}
    for n in np.unique(numbers["n"][rows]):
        of_n = rows & (numbers["n"] == n)
        ratios = np.unique(numbers["ratio"][of_n])
        medians = [float(np.median(numbers["alpha"][of_n & (numbers["ratio"] == ratio)])) for ratio in ratios]
        result[int(n)] = (ratios.tolist(), medians)
    return result
