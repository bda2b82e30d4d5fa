"""A column of numbers from a text file: one number a line, or a named column of a CSV file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.errors import InputError, nearest
from serving.workload.lines import csv_fields, numbered


def read_numbers(path: Path, column: str | None = None) -> np.ndarray:
    """Return the numbers (float64) of ``path``; with ``column``, those under that heading. Raises InputError."""
    lines = numbered(path)
    position = 0
    if column is not None:
        header = next(lines, None)
        if header is None:
            raise InputError(str(path), "is empty")
        headings = [heading.strip() for heading in csv_fields(header)]
        if column not in headings:
            raise InputError(header.where, f"has no column '{column}'", nearest(column, headings))
        position = headings.index(column)
    values = []
    for line in lines:
        fields = csv_fields(line)
        if position >= len(fields):
            raise InputError(line.where, f"has {len(fields)} fields; column {position + 1} is needed")
        try:
            value = float(fields[position])
        except ValueError:
            raise InputError(line.where, f"'{fields[position][:40]}' is no number") from None
        if not np.isfinite(value) or abs(value) > 1e12:
            raise InputError(line.where, f"'{fields[position][:40]}' is out of range")
        values.append(value)
    if not values:
        raise InputError(str(path), "holds no numbers")
    return np.array(values)
