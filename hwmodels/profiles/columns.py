"""Read numeric columns of a profile CSV and refuse, by file, row and column, what cannot be a measurement."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import numpy as np

from serving.errors import InputError, nearest


class Columns:
    """The columns of one file: ``numbers[name]`` are float64 arrays, ``words[name]`` lists of text, all of length ``rows``."""

    def __init__(self, path: Path, numbers: dict[str, np.ndarray], words: dict[str, list[str]]) -> None:
        self.path = path
        self.numbers = numbers
        self.words = words
        self.rows = len(next(iter(numbers.values())))

    def refuse(self, row: int, column: str, problem: str, hint: str = "") -> InputError:
        """Return (not raise) the error for data row ``row`` (0-based; the header is line 1 of the file)."""
        return InputError(f"{self.path}:{row + 2}", f"column '{column}': {problem}", hint)


def read_columns(
    path: Path, *, axes: Sequence[str], times: Sequence[str], words: Sequence[str] = (), signed: Sequence[str] = ()
) -> Columns:
    """Read ``path`` (.csv or .csv.gz).

    ``axes`` are the grid coordinates (finite, >= 0), ``times`` measurements (finite, > 0), ``signed`` any finite
    numbers or nothing (NaN then), ``words`` text. Other columns are ignored. Raises InputError naming file, line and column.
    """
    wanted = [*axes, *times, *signed]
    with _open(path) as stream:
        reader = csv.reader(stream)
        header = [name.strip() for name in next(reader, [])]
        for name in [*wanted, *words]:
            if name not in header:
                raise InputError(str(path), f"column '{name}' is missing", nearest(name, header))
        lines = [line for line in reader if line]
    if not lines:
        raise InputError(str(path), "the file has a header and no rows")
    _refuse_short_lines(path, lines, len(header))
    numbers = {name: _numbers(path, name, [line[header.index(name)] for line in lines], name in signed) for name in wanted}
    for name in axes:
        _refuse_where(path, name, numbers[name] < 0, numbers[name], "a grid coordinate cannot be negative")
    for name in times:
        _refuse_where(path, name, numbers[name] <= 0, numbers[name], "a measured time must be positive")
    return Columns(path, numbers, {name: [line[header.index(name)] for line in lines] for name in words})


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    try:
        stream = gzip.open(path, "rt", newline="") if path.suffix == ".gz" else open(path, newline="")  # noqa: SIM115
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror or error}") from None
    try:
        with stream:
            yield stream
    except (UnicodeDecodeError, csv.Error, gzip.BadGzipFile, EOFError) as error:
        raise InputError(str(path), f"is not a CSV text file: {error}") from None


def _refuse_short_lines(path: Path, lines: list[list[str]], width: int) -> None:
    for row, line in enumerate(lines):
        if len(line) != width:
            raise InputError(f"{path}:{row + 2}", f"{len(line)} fields where the header has {width}")


def _numbers(path: Path, name: str, texts: list[str], blank_allowed: bool) -> np.ndarray:
    values = np.empty(len(texts))
    for row, text in enumerate(texts):
        if blank_allowed and not text.strip():
            values[row] = math.nan
            continue
        try:
            values[row] = float(text)
        except ValueError:
            raise InputError(f"{path}:{row + 2}", f"column '{name}': '{text}' is not a number") from None
        if not math.isfinite(values[row]):
            raise InputError(f"{path}:{row + 2}", f"column '{name}': {text} is not a finite number")
    return values


def _refuse_where(path: Path, name: str, wrong: np.ndarray, values: np.ndarray, problem: str) -> None:
    rows = np.flatnonzero(wrong)
    if rows.size:
        row = int(rows[0])
        raise InputError(f"{path}:{row + 2}", f"column '{name}': {values[row]:g}: {problem}")
