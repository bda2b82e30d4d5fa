"""Our own form, one row of it: the columns that the plain CSV and the plain JSONL share.

    prompt_tokens, output_tokens            required, in tokens
    arrival_s                               seconds, not falling; without it the scenario's arrivals give the times
    max_output_tokens, priority, class, tenant, adapter
    session, turn                           turns of a session wait for the answers before them
    hash_ids, hash_tokens                   content of the prompt: one id per block of hash_tokens tokens, chained
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.errors import InputError, nearest
from serving.workload.traces.format import TraceRow, hashes, required, seconds, shown, whole

COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "max_output_tokens", "priority", "class", "tenant", "session", "turn", "hash_ids", "hash_tokens",
    "adapter",
)  # fmt: skip


def check_columns(names: Any, where: str) -> None:
    """Refuse columns that are not ours: a misspelt one would be ignored in silence. Raises InputError."""
    for name in names:
        if name not in COLUMNS:
            raise InputError(where, f"unknown column '{str(name)[:60]}'", nearest(str(name), COLUMNS))


def plain_row(row: Mapping[str, Any], where: str) -> TraceRow:
    """Return a row of values, texts (CSV) or JSON values; None and an empty text mean: not given. Raises InputError."""
    given = {key: value for key, value in row.items() if value is not None and value != ""}
    prompt = whole(required(given, "prompt_tokens", where), where, "prompt_tokens")
    hash_tokens = whole(given.get("hash_tokens", 0), where, "hash_tokens")
    if "hash_ids" in given and hash_tokens == 0:
        raise InputError(where, "hash_ids need hash_tokens, the tokens that one id stands for")
    return TraceRow(
        where,
        seconds(given["arrival_s"], where, "arrival_s") if "arrival_s" in given else None,
        prompt,
        whole(required(given, "output_tokens", where), where, "output_tokens"),
        hashes(_list(given["hash_ids"], where), where, prompt, hash_tokens) if "hash_ids" in given else (),
        hash_tokens,
        session=_text(given, "session", where),
        turn=whole(given.get("turn", 0), where, "turn"),
        priority=_priority(given["priority"], where) if "priority" in given else None,
        class_name=_text(given, "class", where),
        tenant=_text(given, "tenant", where),
        max_output_tokens=whole(given["max_output_tokens"], where, "max_output_tokens") or None if "max_output_tokens" in given else None,
        adapter=_text(given, "adapter", where) or "",
    )


def _priority(value: Any, where: str) -> int:
    negative = isinstance(value, str) and value.strip().startswith("-")
    if negative:
        return -whole(value.strip()[1:], where, "priority")
    if isinstance(value, int) and value < 0:
        return -whole(-value, where, "priority")
    return whole(value, where, "priority")


def _text(given: Mapping[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > 200:
        raise InputError(where, f"{key} must be a text of at most 200 characters, not {shown(value)}")
    return str(value)


def _list(value: Any, where: str) -> Any:
    """In CSV the ids stand in one field, with blanks between."""
    return [whole(part, where, "hash_ids", most=2**62) for part in value.split()] if isinstance(value, str) else value
