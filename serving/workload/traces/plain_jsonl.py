"""Our own trace form as JSONL: one object a line with the keys of ``plain``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line, json_object
from serving.workload.traces.format import Format, TraceRow, first_object_has
from serving.workload.traces.plain import check_columns, plain_row


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for line in lines:
        row = json_object(line)
        check_columns(row, line.where)
        yield plain_row(row, line.where)


def _recognises(first_line: str) -> bool:
    return first_object_has(first_line, ("prompt_tokens", "output_tokens"))


FORMAT = Format("plain-jsonl", _recognises, _read, turn_timing="recorded")
