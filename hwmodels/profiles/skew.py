"""What unequal decode lengths cost: attention waits for the longest sequence to a measured extent.

    t = t(n, mean) + alpha * [t(n, longest) - t(n, mean)]

``n`` decodes; ``alpha`` depends on n, on the share of them longer than (longest + mean)/2 and, in a batch with a prefill
chunk, on the chunk and its cached context: the longer those, the less one long decode stands out. ``alpha`` comes from
skew.csv, whose own times were taken with another timer than attention.csv's and are not used.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hwmodels.profiles.columns import read_columns
from hwmodels.profiles.grid import locate
from serving.errors import InputError

Medians = dict[int, tuple[list[float], list[float]]]  # n -> (ratios, median alpha at each)


class Skew:
    """Median alpha of each cell (chunk, cached context, n, share), linear between cells and held beyond them.

    ``split_limit`` is the batch from which the attention kernel no longer splits one sequence's KV over several blocks,
    0.8 x 2 x SMs / KV heads of the rank (the heuristic of FlashAttention's decode kernel). Alpha jumps there, so it is
    never interpolated across it.
    """

    def __init__(self, path: Path, *, split_limit: float) -> None:
        table = read_columns(path, axes=("n", "ratio", "pc", "kp"), times=(), signed=("alpha",))
        numbers = table.numbers
        known = ~np.isnan(numbers["alpha"])  # blank where the longest cost no more than the mean
        self.split_limit = split_limit
        self._cache: dict[tuple[int, int, int, int], float] = {}
        self._pure = _medians(numbers, known & (numbers["pc"] == 0))
        mixed = known & (numbers["pc"] > 0)
        if not self._pure or not mixed.any():
            raise InputError(str(path), f"column 'pc' has no rows {'above' if self._pure else 'of'} 0", "pure and mixed batches are needed")
        self._chunks, self._befores = np.unique(numbers["pc"][mixed]).tolist(), np.unique(numbers["kp"][mixed]).tolist()
        self._mixed = [[_medians(numbers, mixed & (numbers["pc"] == pc) & (numbers["kp"] == kp)) for kp in self._befores] for pc in self._chunks]
        for i, row in enumerate(self._mixed):
            for j, cell in enumerate(row):
                if not cell:
                    raise InputError(str(path), f"columns 'pc' and 'kp': no row has {self._chunks[i]:g} and {self._befores[j]:g}", "the grid must be full")

    def alpha(self, chunk: int, before: int, decodes: int, above: int) -> float:
        """Return alpha for ``decodes`` sequences of which ``above`` are longer than (longest + mean)/2.

        ``chunk`` tokens are prefilled in the same batch after ``before`` cached ones; 0 and 0 in a decode-only step.
        """
        if not chunk:
            return self._at(self._pure, (-1, -1, decodes, above))
        i, w = _hold(self._chunks, chunk)
        j, v = _hold(self._befores, before)
        corners = ((i, j, (1 - w) * (1 - v)), (i, j + 1, (1 - w) * v), (i + 1, j, w * (1 - v)), (i + 1, j + 1, w * v))
        return sum(share * self._at(self._mixed[a][b], (a, b, decodes, above)) for a, b, share in corners if share)

    def _at(self, medians: Medians, key: tuple[int, int, int, int]) -> float:
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = self._interpolated(medians, key[2], key[3] / key[2])
        return known

    def _interpolated(self, medians: Medians, decodes: int, ratio: float) -> float:
        split = decodes < self.split_limit
        sizes = [n for n in medians if (n < self.split_limit) == split] or list(medians)
        alphas = [float(np.interp(ratio, *medians[n])) for n in sizes]
        if len(sizes) == 1:
            return alphas[0]
        i, weight = _hold(sizes, decodes)
        return alphas[i] + weight * (alphas[i + 1] - alphas[i]) if weight else alphas[i]


def _hold(axis: list, x: float) -> tuple[int, float]:
    """As ``locate``, but the last value holds beyond the end."""
    i, weight = locate(axis, x)
    return i, min(weight, 1.0)


def _medians(numbers: dict[str, np.ndarray], rows: np.ndarray) -> Medians:
    result = {}
    for n in np.unique(numbers["n"][rows]):
        of_n = rows & (numbers["n"] == n)
        ratios = np.unique(numbers["ratio"][of_n])
        medians = [float(np.median(numbers["alpha"][of_n & (numbers["ratio"] == ratio)])) for ratio in ratios]
        result[int(n)] = (ratios.tolist(), medians)
    return result
