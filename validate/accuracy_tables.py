"""Prints what ``accuracy`` found: run by run with every statistic, tables of many servers by group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np

from validate.measured import pd_ratio, routing_ladder, served
from validate.measured.row import STATISTICS, Row

if TYPE_CHECKING:
    from rich.console import Console

LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E", "output_tokens_per_s": "output tokens/s"}


def print_rows(rows: Sequence[Row], gate: float | None, file: IO[str]) -> None:
    """Print the errors in per cent; ``!`` marks what exceeds the gate."""
    from sim.tables import console_for

    console = console_for(file, 130)
    single, many = _by_kind(rows)
    for heading, metrics in _grouped(single).items():
        _print_run(console, heading, metrics, gate)
    for name, members in many.items():
        _print_many(console, name, members)


def _print_run(console: Console, heading: tuple[str, str, str, str], metrics: dict[str, dict[str, Row]], gate: float | None) -> None:
    dataset, engine, latency_model, fitted_on = heading
    _say(console, f"{dataset}: {engine}, {latency_model}; fitted: {fitted_on}")
    lines = [(f"  {LABELS[metric]}", *(_cell(group.get(statistic), gate) for statistic in STATISTICS)) for metric, group in metrics.items()]
    _table(console, ("error, %", *STATISTICS), lines)


def _print_many(console: Console, name: str, rows: Sequence[Row]) -> None:
    """One line per part and fit: how many, and the median and mean of the size of the errors of each metric."""
    metrics = [metric for metric in LABELS if any(row.metric == metric for row in rows)]
    _say(console, f"{name}: {len({row.dataset for row in rows})} measured, {', '.join(_ordered(row.latency_model for row in rows))}")
    parts: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        parts.setdefault((row.fitted_on, row.dataset.split("/")[1]), []).append(row)
    lines = [(f"  {part}", *_sizes(members, metrics)) for (_, part), members in parts.items()]
    fits = _ordered(fitted for fitted, _ in parts)
    marks = {fitted: str(number) for number, fitted in enumerate(fits, 1)}
    lines = [(*line, marks[fitted]) for line, (fitted, _) in zip(lines, parts)]
    sweep = bool(pd_ratio.readings(rows))
    if any(row.metric == "tpot_s" for row in rows) and not sweep:
        for label, wanted in (("  all, fitted: nothing", [f for f in fits if f == "nothing"]), ("  all, judged on the other half", [f for f in fits if "judged on the rest" in f])):
            pooled = [row for row in rows if row.fitted_on in wanted]
            if pooled:
                lines.append((label, *_sizes(pooled, metrics), ""))
    _table(console, ("|error|, %, median / mean", "rows", *(LABELS[metric] for metric in metrics), "fitted"), lines)
    for fitted, mark in marks.items():
        _say(console, f"  {mark}: {fitted}", bold=False)
    if name.startswith("served"):
        _say(console, f"  left out: {served.EXCLUDED}", bold=False)
    if sweep:
        for line in (*pd_ratio.verdicts(rows), f"left out: {pd_ratio.LEFT_OUT}"):
            _say(console, f"  {line}", bold=False)
    stages = [row for row in rows if row.dataset.endswith("rps")]
    if stages:
        order = routing_ladder.orders(stages)
        wrong = [f"{rate}: {slower} < {faster}" for rate, faster, slower, right in order if not right]
        _say(console, f"  order of TTFT: {len(order) - len(wrong)} of {len(order)} pairs right; wrong or equal: {'; '.join(wrong) or 'none'}", bold=False)
    console.print()


def _sizes(rows: Sequence[Row], metrics: Sequence[str]) -> list[str]:
    cells = [str(len({row.dataset for row in rows}))]
    for metric in metrics:
        errors = np.array([abs(row.error) * 100 for row in rows if row.metric == metric])
        cells.append(f"{np.median(errors):.1f} / {errors.mean():.1f}" if errors.size else "")
    return cells


def _by_kind(rows: Sequence[Row]) -> tuple[list[Row], dict[str, list[Row]]]:
    """Rows of runs, and those of tables by the table's name."""
    single, many = [], {}
    for row in rows:
        if row.dataset.count("/") >= 2:
            many.setdefault(row.dataset.split("/")[0], []).append(row)
        else:
            single.append(row)
    return single, many


def _grouped(rows: Sequence[Row]) -> dict[tuple[str, str, str, str], dict[str, dict[str, Row]]]:
    """Return {(dataset, engine, latency model, fitted on): {metric: {statistic: row}}} in the order of ``rows``."""
    groups: dict[tuple[str, str, str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        heading = (row.dataset, row.engine, row.latency_model, row.fitted_on)
        groups.setdefault(heading, {}).setdefault(row.metric, {})[row.statistic] = row
    return groups


def _cell(row: Row | None, gate: float | None) -> str:
    if row is None:
        return ""
    mark = " !" if gate is not None and abs(row.error) > gate else ""
    return f"{row.error * 100:+.2f}{mark}"


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _say(console: Console, text: str, *, bold: bool = True) -> None:
    console.print(text, style="bold" if bold else "", highlight=False, markup=False, soft_wrap=True)


def _table(console: Console, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number else "left", min_width=9 if number else 18, no_wrap=True)
    for line in lines:
        table.add_row(*(escape(cell) for cell in line))
    console.print(table)
    console.print()
