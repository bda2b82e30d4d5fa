"""Azure LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

https://github.com/Azure/AzurePublicDataset (CC-BY-4.0). Timestamps are wall clock with up to nine fractional digits; those of
2024 end with a UTC offset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from serving.errors import InputError
from serving.workload.lines import Line
from serving.workload.traces.format import Format, TraceRow, shown, whole
from serving.workload.traces.table_rows import table_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2})?")


def _read(lines: Iterable[Line]) -> Iterator[TraceRow]:
    first_ns: int | None = None
    seconds_of: dict[tuple, int] = {}
    for where, row in table_rows(lines, COLUMNS):
        match = _STAMP.fullmatch(row["TIMESTAMP"].strip())
        if match is None:
            raise InputError(where, f"TIMESTAMP must look like 2023-11-16 18:15:46.6805900, not {shown(row['TIMESTAMP'])}")
        second = (match[1], match[3])
        if second not in seconds_of:
            if len(seconds_of) > 100_000:
                seconds_of.clear()
            seconds_of[second] = _epoch_s(match[1], match[3], where)
        # Whole nanoseconds, then relative: a double of seconds since 1970 could not hold the seventh digit.
        stamp_ns = seconds_of[second] * 10**9 + int((match[2] or "0").ljust(9, "0"))
        first_ns = stamp_ns if first_ns is None else first_ns
        yield TraceRow(
            where,
            (stamp_ns - first_ns) / 1e9,
            whole(row["ContextTokens"], where, "ContextTokens"),
            whole(row["GeneratedTokens"], where, "GeneratedTokens"),
        )


def _epoch_s(text: str, offset: str | None, where: str) -> int:
    try:
        stamp = datetime.fromisoformat(text + (offset or "").replace("Z", "+00:00"))
        return round((stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise InputError(where, f"TIMESTAMP {text} is no date and time") from None


def _recognises(first_line: str) -> bool:
    return first_line.replace(" ", "").startswith(",".join(COLUMNS))


FORMAT = Format("azure", _recognises, _read)
