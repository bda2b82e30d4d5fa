"""Readers of recorded workloads: one module a format, found by name or by the first line of the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from serving.errors import InputError, nearest
from serving.workload.lines import numbered
from serving.workload.traces import (
    agent_sessions,
    aibrix,
    azure,
    burstgpt,
    length_pairs,
    mooncake,
    plain_csv,
    plain_jsonl,
    qwen_bailian,
)
from serving.workload.traces.format import Format, TraceRow

__all__ = ["FORMATS", "Format", "TraceRow", "find_format", "read"]


def find_format(path: Path, name: str | None = None) -> Format:
    """Return the format called ``name``, or the one that recognises the file's first line. Raises InputError."""
    if name is not None:
        if name not in FORMATS:
            raise InputError("workload.trace.format", f"'{name}' is not known", nearest(name, FORMATS))
        return FORMATS[name]
    lines = numbered(path)
    first = next(lines, None)
    lines.close()
    if first is None:
        raise InputError(str(path), "the trace is empty")
    for each in FORMATS.values():
        if each.recognises(first.text):
            return each
    raise InputError(first.where, "no trace format recognises this line", "formats: " + ", ".join(FORMATS))


def read(path: Path, trace_format: Format) -> Iterator[TraceRow]:
    """Yield the rows of a trace as they stand in the file. Raises InputError, naming file and line, at a broken one."""
    lines = numbered(path)
    first = next(lines, None)
    if first is None:
        raise InputError(str(path), "the trace is empty")
    yield from trace_format.read(chain((first,), lines))


FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (azure, burstgpt, mooncake, qwen_bailian, agent_sessions, aibrix, length_pairs, plain_csv, plain_jsonl)
}
