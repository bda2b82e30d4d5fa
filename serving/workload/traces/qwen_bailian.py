"""Qwen-Bailian: JSONL with chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn, hash_ids of 16 tokens.

https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon (Apache-2.0). Rows keep their recorded times by default; a turn's
session is that of its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.errors import InputError
from serving.workload.lines import Line, json_object
from serving.workload.traces.format import Format, TraceRow, first_object_has, hashes, required, seconds, shown, whole

HASH_TOKENS = 16


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    session_of: dict[object, str] = {}
    for line in lines:
        row = json_object(line)
        where = line.where
        chat, parent = required(row, "chat_id", where), row.get("parent_chat_id", -1)
        if not isinstance(chat, int | str) or not isinstance(parent, int | str | None):
            raise InputError(where, f"chat_id and parent_chat_id must be numbers or texts, not {shown((chat, parent))}")
        session_of[chat] = session_of.get(parent, str(chat))
        prompt = whole(required(row, "input_length", where), where, "input_length")
        yield TraceRow(
            where,
            seconds(required(row, "timestamp", where), where, "timestamp"),
            prompt,
            whole(required(row, "output_length", where), where, "output_length"),
            hashes(row.get("hash_ids", []), where, prompt, HASH_TOKENS),
            HASH_TOKENS,
            session=session_of[chat],
            turn=whole(row.get("turn", 0), where, "turn"),
        )


def _recognises(first_line: str) -> bool:
    return first_object_has(first_line, ("chat_id", "timestamp", "input_length", "output_length"))


FORMAT = Format("qwen-bailian", _recognises, _read)
