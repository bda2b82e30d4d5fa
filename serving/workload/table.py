"""The committed table of a trace: rate per minute, prompt quantiles, and output quantiles by prompt length.

``tabulate`` derives such a table from a trace; ``scenarios/data`` holds them. Keys: ``rate_per_minute`` (arrivals counted in
each minute), ``prompt_tokens`` (equally spaced quantiles), ``output_tokens`` (a list of {prompt_up_to, quantiles}, rising).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import InputError
from serving.files import read_text
from serving.scenario.yaml_text import parse
from serving.workload.lengths import interpolate


@dataclass(frozen=True, slots=True)
class LengthTable:
    """``prompt``: quantiles (float64). Row i of ``output`` (float64, rows x levels) holds for prompts up to ``edges[i]``."""

    prompt: np.ndarray
    edges: np.ndarray
    output: np.ndarray

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``n`` prompt lengths and output lengths (int64), with the dependence that the trace had."""
        levels = rng.random((n, 2))
        prompt = np.rint(interpolate(self.prompt, levels[:, 0])).astype(np.int64)
        row = np.searchsorted(self.edges, prompt).clip(max=self.edges.size - 1)
        position = levels[:, 1] * (self.output.shape[1] - 1)
        left = np.minimum(position.astype(np.int64), self.output.shape[1] - 2)
        low, high = self.output[row, left], self.output[row, left + 1]
        return np.maximum(prompt, 1), np.maximum(np.rint(low + (high - low) * (position - left)).astype(np.int64), 1)

    @property
    def largest_output(self) -> int:
        """The largest output length in the table, in tokens."""
        return int(self.output.max())


def read_lengths(path: Path) -> LengthTable:
    """Read the lengths of a table file. Raises InputError."""
    table = _read(path)
    prompt = _numbers(table, "prompt_tokens", path, at_least=2)
    _rising(prompt, "prompt_tokens", path)
    rows = table.get("output_tokens")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(str(path), "output_tokens must be a list of {prompt_up_to, quantiles}")
    output = [_numbers(row, "quantiles", path, at_least=2) for row in rows]
    edges = np.concatenate([_numbers({"prompt_up_to": [row.get("prompt_up_to")]}, "prompt_up_to", path) for row in rows])
    if len({quantiles.size for quantiles in output}) > 1:
        raise InputError(str(path), "output_tokens: all rows need the same number of quantiles")
    for quantiles in output:
        _rising(quantiles, "output_tokens", path)
    _rising(edges, "prompt_up_to", path)
    return LengthTable(prompt, edges, np.stack(output))


def read_rates(path: Path) -> tuple[float, ...]:
    """Read the arrivals per minute of a table file. Raises InputError."""
    rates = _numbers(_read(path), "rate_per_minute", path)
    if not rates.any():
        raise InputError(str(path), "rate_per_minute is zero throughout")
    return tuple(rates.tolist())


def _read(path: Path) -> dict[str, Any]:
    table = parse(read_text(path), str(path)).value
    if not isinstance(table, dict):
        raise InputError(str(path), "a table must be a mapping of keys")
    return table


def _numbers(table: dict[str, Any], key: str, path: Path, *, at_least: int = 1) -> np.ndarray:
    values = table.get(key)
    good = isinstance(values, list) and len(values) >= at_least
    if not good or not all(isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e9 for value in values):
        raise InputError(str(path), f"{key} must be at least {at_least} numbers between 0 and 1e9")
    return np.array(values, dtype=np.float64)


def _rising(values: np.ndarray, key: str, path: Path) -> None:
    if np.any(np.diff(values) < 0):
        raise InputError(str(path), f"{key} must not fall")
