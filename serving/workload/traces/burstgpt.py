"""BurstGPT: CSV with Timestamp (seconds), Model, Request tokens, Response tokens, Total tokens, Log Type.

https://github.com/HPMLL/BurstGPT (CC-BY-4.0). Failed calls are rows of 0/0 tokens; ``zero_rows`` decides what to do with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line
from serving.workload.traces.format import Format, TraceRow, seconds, whole
from serving.workload.traces.table_rows import table_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for where, row in table_rows(lines, COLUMNS):
        yield TraceRow(
            where,
            seconds(row["Timestamp"], where, "Timestamp"),
            whole(row["Request tokens"], where, "Request tokens"),
            whole(row["Response tokens"], where, "Response tokens"),
        )


def _recognises(first_line: str) -> bool:
    return all(column in first_line for column in COLUMNS) and not first_line.lstrip().startswith("{")


FORMAT = Format("burstgpt", _recognises, _read)
