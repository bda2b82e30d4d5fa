"""Agent sessions (LMCache): JSONL with session_id, turn, timestamp_ms from the session's start, lengths, hash_ids of 64 tokens.

From LMCache (Apache-2.0). All sessions begin at time zero; ``workload.arrivals`` spreads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from serving.errors import InputError
from serving.workload.lines import Line, json_object
from serving.workload.traces.format import Format, TraceRow, first_object_has, hashes, required, seconds, shown, whole

HASH_TOKENS = 64


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    for line in lines:
        row = json_object(line)
        where = line.where
        session = required(row, "session_id", where)
        if not isinstance(session, str | int):
            raise InputError(where, f"session_id must be a text or a number, not {shown(session)}")
        prompt = whole(required(row, "input_length", where), where, "input_length")
        yield TraceRow(
            where,
            seconds(required(row, "timestamp_ms", where), where, "timestamp_ms", per_second=1000.0),
            prompt,
            whole(required(row, "output_length", where), where, "output_length"),
            hashes(row.get("hash_ids", []), where, prompt, HASH_TOKENS),
            HASH_TOKENS,
            session=str(session),
            turn=whole(required(row, "turn", where), where, "turn"),
        )


def _recognises(first_line: str) -> bool:
    return first_object_has(first_line, ("session_id", "turn", "timestamp_ms", "input_length"))


FORMAT = Format("agent-sessions", _recognises, _read, turn_timing="after_answer", sessions_start_at_zero=True)
