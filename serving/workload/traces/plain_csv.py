"""Our own trace form as CSV: a header with the columns of ``plain``, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line
from serving.workload.traces.format import Format, TraceRow
from serving.workload.traces.plain import check_columns, plain_row
from serving.workload.traces.table_rows import table_rows


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    checked = False
    for where, row in table_rows(lines, ("prompt_tokens", "output_tokens")):
        if not checked:
            check_columns(row, where)
            checked = True
        yield plain_row(row, where)


def _recognises(first_line: str) -> bool:
    headings = [heading.strip() for heading in first_line.split(",")]
    return "prompt_tokens" in headings and "output_tokens" in headings


FORMAT = Format("plain-csv", _recognises, _read, turn_timing="recorded")
