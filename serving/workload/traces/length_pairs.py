"""Length pairs without arrivals (Vidur's processed data sets): CSV with num_prefill_tokens and num_decode_tokens.

https://github.com/microsoft/vidur (MIT). The scenario's ``workload.arrivals`` gives the times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line
from serving.workload.traces.format import Format, TraceRow, whole
from serving.workload.traces.table_rows import table_rows

COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for where, row in table_rows(lines, COLUMNS):
        yield TraceRow(where, None, *(whole(row[column], where, column) for column in COLUMNS))


def _recognises(first_line: str) -> bool:
    return all(column in first_line for column in COLUMNS) and not first_line.lstrip().startswith("{")


FORMAT = Format("length-pairs", _recognises, _read)
