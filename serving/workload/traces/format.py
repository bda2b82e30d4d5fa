"""What a reader of a trace format gives: rows of one form, and how to know its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from serving.errors import InputError, nearest
from serving.workload.lines import Line

MAX_VALUE = 10**9
MAX_TIME_S = 1e11
TurnTiming = Literal["open", "after_answer", "recorded"]


class TraceRow(NamedTuple):
    """One recorded request. ``arrival_s`` is None where the trace has lengths only; counts are in tokens.

    ``hash_ids`` names the content of the prompt, block by block of ``hash_tokens`` tokens, each chained to those before.
    In a session, ``arrival_s`` may count from the session's own start (``Format.sessions_start_at_zero``).
    """

    where: str
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    hash_tokens: int = 0
    session: str | None = None
    turn: int = 0
    priority: int | None = None
    class_name: str | None = None
    tenant: str | None = None
    max_output_tokens: int | None = None
    adapter: str = ""


class Format(NamedTuple):
    """One trace format. ``recognises`` sees the first line; ``read`` gets all lines and raises InputError at a broken one.

    ``turn_timing`` says when a turn of a session comes: at its recorded time whatever happened before (``open``), its
    recorded gap after the answer before it, or at its recorded time but not before that answer.
    """

    name: str
    recognises: Callable[[str], bool]
    read: Callable[[Iterable[Line]], Iterator[TraceRow]]
    turn_timing: TurnTiming = "open"
    sessions_start_at_zero: bool = False


def whole(value: Any, where: str, what: str, *, most: int = MAX_VALUE) -> int:
    """Return ``value``, a text or a JSON number, as a whole number from 0 to ``most``. Raises InputError."""
    if isinstance(value, str):
        text = value.strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None  # not true for inf and nan
    else:
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is None:
        raise InputError(where, f"{what} must be a whole number, not {shown(value)}")
    if not 0 <= number <= most:
        raise InputError(where, f"{what} must be between 0 and {most:,}, not {shown(value)}")
    return number


def seconds(value: Any, where: str, what: str, *, per_second: float = 1.0) -> float:
    """Return a time, given as a text or a JSON number in units of 1 / ``per_second`` s, in seconds. Raises InputError."""
    try:
        number = float(value) / per_second if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or not -MAX_TIME_S <= number <= MAX_TIME_S:  # false for nan
        raise InputError(where, f"{what} must be a time, not {shown(value)}")
    return number


def hashes(value: Any, where: str, prompt_tokens: int, hash_tokens: int) -> tuple[int, ...]:
    """Return a list of content hashes, no longer than the prompt allows. Raises InputError."""
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise InputError(where, "hash_ids must be a list of whole numbers")
    if len(value) * hash_tokens >= prompt_tokens + hash_tokens:
        raise InputError(where, f"{len(value)} hash_ids of {hash_tokens} tokens are more than a prompt of {prompt_tokens} tokens has")
    if any(abs(each) > 2**62 for each in value):
        raise InputError(where, "hash_ids must be smaller than 2^62")
    return tuple(value)


def required(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Return ``row[key]``. Raises InputError with the nearest key that is there."""
    if key not in row:
        raise InputError(where, f"has no '{key}'", nearest(key, [str(each) for each in row]))
    return row[key]


def shown(value: Any) -> str:
    """Return a short form of a wrong value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_object_has(first_line: str, present: Iterable[str], absent: Iterable[str] = ()) -> bool:
    """Say whether a line looks like a JSON object with some keys and without others; cheap, for recognition only."""
    text = first_line.lstrip()
    return text.startswith("{") and all(f'"{key}"' in text for key in present) and not any(f'"{key}"' in text for key in absent)
