"""A comparison on a terminal: what changed, the objectives, the properties, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from validate.regress.gate import Objective, Verdict
from validate.regress.measure import BURN_WINDOWS_S, metric
from validate.regress.render import change_words, mishaps, value_words, verdict_of
from validate.regress.run import Report

_WIDTH = 150  # columns where there is no terminal
_MARKS = {"regressed": "FAIL", "improved": "better", "undecided": "undecided"}
_STYLES = {"regressed": "bold red", "improved": "green"}
_NARROW = 120  # columns: a terminal of fewer shows fewer figures rather than parts of all


class Column(NamedTuple):
    """A column of a table. ``right``: figures; ``wide_only``: a narrow terminal does without."""

    title: str
    right: bool = False
    wide_only: bool = False


def print_report(report: Report, files: dict[str, list[str]], file: IO[str]) -> None:
    """Print the tables. Plain text of a fixed width where ``file`` is no terminal: the same bytes for the same input."""
    from rich.markup import escape

    from sim.tables import console_for

    console = console_for(file, None if file.isatty() else _WIDTH)
    with console.capture() as printed:
        title = f"{', '.join(map(str, report.candidate))} against {', '.join(each.shown for each in report.baseline)}"
        console.print(
            f"[bold]{escape(title)}[/bold]: suite {escape(report.suite)}, {report.settings.replications} pairs a scenario", highlight=False
        )
        narrow = console.width < _NARROW
        for table in (_metric_table(report, narrow), _slo_table(report, narrow), _property_table(report)):
            if table is not None:
                console.print()
                console.print(table)
        console.print()
        for heading, text in mishaps(report, files):
            console.print(f"[red]{escape(heading)}[/red]: {escape(text)}", highlight=False, soft_wrap=True)
        console.print(
            f"[bold red]REGRESSED[/bold red]: {escape(_why(report))}" if report.regressed else "[green]no regression[/green]",
            highlight=False,
        )
    file.writelines(line.rstrip() + "\n" for line in printed.get().splitlines())


def _why(report: Report) -> str:
    """What the candidate fails in, in a few words."""
    worse = [verdict for verdict in report.verdicts if verdict.regressed]
    scenarios = len({verdict.scenario for verdict in worse})
    counted = f"{len(worse)} metric{'s' * (len(worse) > 1)} worse in {scenarios} scenario{'s' * (scenarios > 1)}"
    failed = [f"{failure.scenario} cannot be run" for failure in report.failures if failure.side == "candidate"]
    broken = [finding.name for finding in report.properties if finding.broken]
    return "; ".join([*failed, *([f"{', '.join(broken)} broken"] if broken else []), *([counted] if worse else [])])


def _table(narrow: bool, columns: Sequence[Column]) -> Any:
    """A table of those columns; a narrow one leaves out what it can do without."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for column in columns:
        if not (narrow and column.wide_only):
            table.add_column(column.title, no_wrap=True, justify="right" if column.right else "left")
    return table


def _add(table: Any, narrow: bool, columns: Sequence[Column], cells: Sequence[str], style: str = "") -> None:
    from rich.markup import escape

    table.add_row(*(escape(cell) for cell, column in zip(cells, columns) if not (narrow and column.wide_only)), style=style)


def _metric_table(report: Report, narrow: bool) -> Any:
    """What changed, or might have; metrics that certainly did not are counted. A narrow table has the scenarios as lines of their own."""
    if not report.verdicts:
        return None
    interval = Column(f"{1 - 2 * report.settings.alpha:.0%} interval", wide_only=True)
    columns = (
        Column("Scenario", wide_only=True), Column("Metric"), Column("Baseline", right=True), Column("Candidate", right=True),
        Column("Change", right=True), interval, Column("p", right=True, wide_only=True), Column(""),
    )  # fmt: skip
    table = _table(narrow, columns)
    for name in dict.fromkeys(each.scenario for each in report.verdicts):
        mine = [each for each in report.verdicts if each.scenario == name]
        rows = [
            (_cells(each, None if narrow else report.settings.replications), _STYLES.get(each.verdict, ""))
            for each in mine
            if each.verdict != "unchanged"
        ]
        same = len(mine) - len(rows)
        if same:
            count = f"{same} {'other ' * bool(rows)}metric{'s' * (same > 1)}"
            within = f"within {report.settings.effect * 100:g}%"
            rows.append(((count, "", "", within if narrow else "", within, "", "same"), "dim"))
        if narrow:
            _add(table, narrow, columns, ("", name, "", "", "", "", "", ""), "bold")
        for index, (cells, style) in enumerate(rows):
            _add(table, narrow, columns, ("" if index else name, *cells), style)
    return table


def _cells(each: Verdict, pairs: int | None) -> tuple[str, ...]:
    """The cells of a row. ``pairs``: how many there were, where there is room to say that more are needed."""
    more = pairs is not None and each.verdict == "undecided" and each.required > pairs
    mark = _MARKS[each.verdict] + (f": {each.required} pairs would tell" if more else "")
    values = (value_words(each, each.baseline), value_words(each, each.candidate))
    return (metric(each.metric).label, *values, *change_words(each), f"{each.p:.1g}", mark)


def _slo_table(report: Report, narrow: bool) -> Any:
    if not report.objectives:
        return None
    windows = [Column(f"worst {seconds:g} s", right=True, wide_only=True) for seconds in BURN_WINDOWS_S]
    columns = (
        Column("Scenario"), Column("Class"), Column("Asked", right=True), Column("Baseline", right=True), Column("Candidate", right=True),
        Column("Burn rate", right=True, wide_only=True), *windows, Column("Objective"),
    )  # fmt: skip
    table, before = _table(narrow, columns), None
    for row in report.objectives:
        cells = (f"{row.asked:.2%}", f"{row.baseline:.2%}", f"{row.candidate:.2%}", *_burns(row), row.verdict)
        name, before = "" if row.scenario == before else row.scenario, row.scenario
        _add(table, narrow, columns, (name, row.class_name, *cells), "bold red" if row.verdict == "broken" else "")
    return table


def _burns(row: Objective) -> Iterator[str]:
    """Overall and in the worst windows: one figure where both sides have the same."""
    for old, new in zip(row.burn_baseline, row.burn_candidate):
        yield f"{new:.1f}" if f"{old:.1f}" == f"{new:.1f}" else f"{old:.1f} -> {new:.1f}"


def _property_table(report: Report) -> Any:
    from rich.markup import escape

    if not report.properties:
        return None
    table = _table(False, (Column("Property"), Column(""), Column("What must hold")))
    table.columns[2].no_wrap = False
    for finding in report.properties:
        verdict = verdict_of(finding)
        table.add_row(finding.name, verdict, escape(finding.skipped or finding.title), style="bold red" if finding.broken else "")
    return table
