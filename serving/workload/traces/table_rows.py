"""Rows of a CSV trace: a header, then lines with as many fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.errors import InputError, nearest
from serving.workload.lines import Line, csv_fields


def table_rows(lines: Iterable[Line], needed: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (file:line, row by heading) of each line after the header. Raises InputError where a column or field is missing."""
    rows = iter(lines)
    header = next(rows, None)
    if header is None:
        return
    headings = [heading.strip() for heading in csv_fields(header)]
    for column in needed:
        if column not in headings:
            raise InputError(header.where, f"has no column '{column}'", nearest(column, headings))
    if len(set(headings)) < len(headings):
        raise InputError(header.where, "two columns have the same heading")
    for line in rows:
        fields = csv_fields(line)
        if len(fields) != len(headings):
            raise InputError(line.where, f"has {len(fields)} fields, the header has {len(headings)}")
        yield line.where, dict(zip(headings, fields))
