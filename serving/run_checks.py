"""What the files of a run directory must hold before a later stage computes with them: each fault by file, row and column, or by key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

_NEVER_CAME = {"scheduled_s", "first_token_s", "finish_s"}  # NaN where a request was refused or cut off
_ANY_SIGN = {"replica"}  # -1: none
_LATENCY = ("mean", "p50", "p90", "p95", "p99", "max")
_GROUPS = {
    "requests": ("arrived", "completed", "rejected", "failed", "preempted"), "slo_attainment": ("overall",), "kv_utilisation": ("mean", "max"),
    **dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"), _LATENCY),
}  # fmt: skip
_MAY_BE_UNKNOWN = {"slo_attainment", "kv_utilisation"}  # an importer knows neither what was promised nor the pool
_NUMBERS = ("duration_s", "output_tokens_per_s", "prompt_tokens_per_s", "requests_per_s", "goodput_rps", "preemptions", "gpu_busy_fraction")


def check_summary(summary: Mapping[str, Any], path: Path, *, complete: bool = False) -> None:
    """Raise InputError naming the key when a figure of the contract is no number (null: there was nothing to measure).

    With ``complete`` every one of them must be there: a report shows them all, an importer may know only some.
    """
    for key in _NUMBERS:
        _number(summary, key, path, key, complete)
    for group, keys in _GROUPS.items():
        if (group in _MAY_BE_UNKNOWN and group in summary and summary[group] is None) or (group not in summary and not complete):
            continue
        found = summary.get(group)
        if not isinstance(found, dict):
            raise InputError(f"{path}: {group}", "must be a mapping of figures" if group in summary else "is missing")
        for key in keys:
            _number(found, key, path, f"{group}.{key}", complete)
    by_class = (summary.get("slo_attainment") or {}).get("by_class") or {}
    if not isinstance(by_class, dict):
        raise InputError(f"{path}: slo_attainment.by_class", "must be a mapping from class to figure")
    for name in by_class:
        _number(by_class, name, path, f"slo_attainment.by_class.{name}", complete)


def _number(found: Mapping[str, Any], key: str, path: Path, where: str, complete: bool) -> None:
    if key not in found and complete:
        raise InputError(f"{path}: {where}", "is missing")
    value = found.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InputError(f"{path}: {where}", "must be a number", f"got {str(value)[:40]!r}")


def check_rows(batch: pa.Table | pa.RecordBatch, columns: Mapping[str, str], path: Path, first_row: int = 0) -> None:
    """Raise InputError for a column of another kind than ``columns`` says, and for a row with nothing in it, a figure not finite or negative."""
    import pyarrow as pa

    for name, kind in columns.items():
        column = batch.column(name)
        if kind != "text" and not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise InputError(str(path), f"the column '{name}' holds {column.type}, not {kind}")
        if column.null_count:
            raise InputError(f"{path}: row {first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))}", f"'{name}' is empty")
        if kind == "text" or not len(column):
            continue
        values = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
        fine = np.isfinite(values) | (np.isnan(values) if name in _NEVER_CAME else False)
        if name not in _ANY_SIGN:
            fine &= ~(values < 0)
        if not fine.all():
            row = int(np.argmin(fine))
            raise InputError(f"{path}: row {first_row + row}", f"'{name}' is {values[row]:g}")
