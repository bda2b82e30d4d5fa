"""AIBrix lengths: JSONL with timestamp (ms), input_length and output_length. https://github.com/vllm-project/aibrix (Apache-2.0)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line, json_object
from serving.workload.traces.format import Format, TraceRow, first_object_has, required, seconds, whole


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for line in lines:
        row = json_object(line)
        yield TraceRow(
            line.where,
            seconds(required(row, "timestamp", line.where), line.where, "timestamp", per_second=1000.0),
            whole(required(row, "input_length", line.where), line.where, "input_length"),
            whole(required(row, "output_length", line.where), line.where, "output_length"),
        )


def _recognises(first_line: str) -> bool:
    return first_object_has(first_line, ("timestamp", "input_length", "output_length"), absent=("hash_ids", "chat_id", "session_id"))


FORMAT = Format("aibrix", _recognises, _read)
