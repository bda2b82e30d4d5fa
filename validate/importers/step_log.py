"""A log of steps, from an engine that was made to write one: CSV or JSON lines with the columns of steps.parquet.

Needed: ``duration_s`` (or ``duration_ms``), ``prefill_tokens``, ``prefill_seqs``, ``decode_seqs``, ``decode_context_tokens``.
Without ``start_s`` the steps are laid end to end; other columns are taken when there.
"""

from __future__ import annotations

from typing import Any

from serving.errors import InputError, nearest
from serving.records import STEP_COLUMNS
from validate.importers.imported import Imported
from validate.importers.source import Source, number

NAME = "step-log"
_NEEDED = ("prefill_tokens", "prefill_seqs", "decode_seqs", "decode_context_tokens")
_DEFAULTS = {"replica": 0, "kv_blocks_used": 0, "graph": 0, "preempted": 0, "steps": 1}


def matches(source: Source) -> bool:
    """Whether header or first line name a step's duration and decodes."""
    names = source.first_line if source.first_line is not None else source.header
    return "decode_seqs" in names and ("duration_s" in names or "duration_ms" in names)


def read(source: Source, select: int | None = None) -> Imported:
    """Read the steps. Raises InputError naming the line and column that is wrong."""
    run = Imported(NAME, source.path)
    rows: list[tuple[int, dict[str, Any]]] = source.lines() if source.first_line is not None else source.csv_rows()
    if not rows:
        raise InputError(str(source.path), "holds no step")
    for name in _NEEDED:
        if name not in rows[0][1]:
            raise InputError(str(source.path), f"lacks the column '{name}'", nearest(name, rows[0][1]))
    laid_end_to_end = "start_s" not in rows[0][1]
    clock_s = 0.0
    for position, (line, row) in enumerate(rows):
        where = f"{source.path}:{line}"
        duration_s = number(row, "duration_s", where) if "duration_s" in row else number(row, "duration_ms", where) / 1e3
        start_s = clock_s if laid_end_to_end else number(row, "start_s", where)
        if start_s < clock_s - 1e-6 and not row.get("replica"):
            raise InputError(where, f"column 'start_s': {start_s:g} lies before the end of the step before it, {clock_s:g}")
        clock_s = max(clock_s, start_s + duration_s)
        values = {"step": int(row.get("step") or position), "start_s": start_s, "duration_s": duration_s}
        values |= {name: int(number(row, name, where)) for name in _NEEDED}
        values |= {name: int(row.get(name) or default) for name, default in _DEFAULTS.items()}
        run.steps.append(tuple(values[name] for name in STEP_COLUMNS))
    run.duration_s = clock_s
    if laid_end_to_end:
        run.notes.append("the log has no start times: steps are laid end to end, idle time is lost")
    missing = [name for name in _DEFAULTS if name not in rows[0][1]]
    if missing:
        run.notes.append("not in the log, and zero (steps: one) in the table: " + ", ".join(missing))
    return run
