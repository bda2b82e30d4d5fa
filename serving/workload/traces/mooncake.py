"""Mooncake: JSONL with timestamp (ms), input_length, output_length and hash_ids of 512-token prompt blocks.

https://github.com/kvcache-ai/Mooncake (Apache-2.0). The last id stands for the rest of the prompt, a full block or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.workload.lines import Line, json_object
from serving.workload.traces.format import Format, TraceRow, first_object_has, hashes, required, seconds, whole

HASH_TOKENS = 512


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for line in lines:
        row = json_object(line)
        prompt = whole(required(row, "input_length", line.where), line.where, "input_length")
        yield TraceRow(
            line.where,
            seconds(required(row, "timestamp", line.where), line.where, "timestamp", per_second=1000.0),
            prompt,
            whole(required(row, "output_length", line.where), line.where, "output_length"),
            hashes(required(row, "hash_ids", line.where), line.where, prompt, HASH_TOKENS),
            HASH_TOKENS,
        )


def _recognises(first_line: str) -> bool:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return first_object_has(first_line, keys, absent=("chat_id", "session_id"))


FORMAT = Format("mooncake", _recognises, _read)
