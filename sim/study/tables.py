"""Tables of studies for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from sim.study.sweep import Sweep
from sim.study.verdict import t_reach
from sim.tables import console_for

_SWEEP = (  # column of the table, heading, factor, decimals of a small figure
    ("ttft_s.p99", "TTFT p99 ms", 1e3), ("tpot_s.p99", "TPOT p99 ms", 1e3), ("goodput_rps", "goodput /s", 1.0),
    ("output_tokens_per_s", "output tok/s", 1.0), ("slo_attainment.overall", "in SLO %", 100.0), ("load_factor", "load", 1.0),
    ("usd_per_million_output_tokens", "$/M out", 1.0),
)  # fmt: skip
_ROWS = 200
_WIDEST_WHOLE = 26  # a column so wide or narrower is never cut


def figure(value: float | None) -> str:
    """Three or so significant digits; a dash for nothing."""
    if value is None:
        return "-"
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 0.01 or value == 0
        else f"{value:.2g}"
    )


def print_sweep(name: str, sweep: Sweep, file: IO[str]) -> None:
    """One row per setting; with several seeds, means and the half width of their 95 % interval."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sweep.rows:
        groups.setdefault(str([row[path] for path in sweep.paths]), []).append(row)
    several = max(map(len, groups.values())) > 1
    header = [path.split(".")[-1] if _unique_ends(sweep.paths) else path for path in sweep.paths] + [title for _, title, _ in _SWEEP]
    body = [[*(_shown(rows[0][path]) for path in sweep.paths), *_figures(rows)] for rows in groups.values()]
    lines = [f"{name}: {len(groups)} settings" + (f", {len(sweep.rows)} runs; +- is half the 95 % interval over seeds" if several else "")]
    write(file, lines, header, body[:_ROWS], words=len(sweep.paths))
    if len(body) > _ROWS:
        file.write(f"... and {len(body) - _ROWS} more: --json or --out has them all\n")


def _unique_ends(paths: Sequence[str]) -> bool:
    ends = [path.split(".")[-1] for path in paths]
    return len(set(ends)) == len(ends)


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    why = next((row["not_run"] for row in rows if row["not_run"] is not None), None)
    if why is not None:
        return [f"not run: {why}"[:110], *[""] * (len(_SWEEP) - 1)]
    cells = []
    for column, _, factor in _SWEEP:
        values = [row[column] * factor for row in rows if row.get(column) is not None]
        if not values:
            cells.append("-")
            continue
        mean = sum(values) / len(values)
        cells.append(figure(mean) + (f" +-{figure(t_reach(values, 0.975))}" if len(values) > 1 else ""))
    return cells


def write(file: IO[str], lines: Sequence[str], header: Sequence[str], body: Sequence[Sequence[str]], *, words: int) -> None:
    """A heading and a table, if it has rows: plain ASCII as wide as it needs to be where ``file`` is no terminal.

    On a terminal headings are wrapped where that makes it fit; if nothing does, the last columns of figures are left out and named.
    """
    from rich.markup import escape

    console = console_for(file, 400 if not file.isatty() else None)
    kept = len(header)
    if file.isatty() and body:
        while kept > words + 1 and sum(_least_widths(header[:kept], body)) + 2 * kept > console.width:
            kept -= 1
    with console.capture() as printed:
        for line in lines:
            console.print(escape(line), highlight=False)
        if body:
            console.print()
            console.print(_grid(header[:kept], [row[:kept] for row in body], words, None if not file.isatty() else console.width))
        if kept < len(header):
            console.print(f"[dim]no room for {escape(', '.join(header[kept:]))} (--json has all)[/dim]", highlight=False)
    file.writelines(line.rstrip() + "\n" for line in printed.get().splitlines())


def _grid(header: Sequence[str], body: Sequence[Sequence[str]], words: int, width: int | None) -> Any:
    """The table itself; ``width``: of the terminal, None where there is none."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    crowded = width is not None and _natural_width(header, body) > width
    table = Table(box=None if width is None else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if crowded else 2, 0, 0), show_edge=False)
    for index, (title, least) in enumerate(zip(header, _least_widths(header, body))):
        side = "left" if index < words else "right"
        table.add_column(escape(title), justify=side, no_wrap=width is None, overflow="fold", width=least if crowded else None)
    for row in body:
        table.add_row(*map(escape, row))
    return table


def _least_widths(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    """What each column takes if its heading is wrapped between words, and its cells only where they are long."""
    return [min(max(map(len, (*cells, *title.split()))), _WIDEST_WHOLE) for title, cells in zip(header, zip(*body))]


def print_plan(plan: Mapping[str, Any], file: IO[str]) -> None:
    """The ranked fleets, what stands against the rest, and the advice.

    A terminal too narrow for the table gets the fleets as a numbered list, and the most wanted of their figures without intervals.
    """
    feasible = [row for row in plan["plans"] if row["feasible"]]
    columns = _columns()
    header, body = [column.title for column in columns], [[column.cell(row) for column in columns] for row in feasible]
    width = console_for(file).width if file.isatty() else None
    if width is not None and _natural_width(header, body) > width:
        kept = [column for column in columns if column.brief is not None]
        names = [f"{number:>2}  {row['name']}" for number, row in enumerate(feasible, 1)]
        header = ["", *(column.title for column in kept)]
        body = [[f"{number:>2}", *(column.brief(row) for column in kept)] for number, row in enumerate(feasible, 1)]
        write(file, [*plan["headline"], "", *names], header, body, words=1)
    else:
        write(file, plan["headline"], header, body, words=1)
    parts = {"What breaks first": "breaks_first", "Trade-offs": "advice", "Operating points": "operating_point_lines", "Not chosen": "rest"}
    for title, key in parts.items():
        if plan[key]:
            file.write(f"\n{title}\n" + "".join(_indented(line, width) for line in plan[key]))


class _Column(NamedTuple):
    """A column of the plan's table; ``brief`` words its cells where room is short, None: it is left out there."""

    title: str
    cell: Callable[[Mapping[str, Any]], str]
    brief: Callable[[Mapping[str, Any]], str] | None = None


def _columns() -> list[_Column]:
    def plain(title: str, cell: Callable[[Mapping[str, Any]], str]) -> _Column:
        return _Column(title, cell, cell)

    return [
        _Column("fleet", lambda row: row["name"]),
        plain("$/h", lambda row: figure(row["cost_per_hour_usd"])),
        plain("GPUs", lambda row: str(row["gpus"])),
        plain("$/M out", lambda row: figure(row["usd_per_million_output_tokens"])),
        _Column("in SLO %", _attained, lambda row: f"{row['slo_attainment'] * 100:.2f}"),
        _Column("load", _load, lambda row: _load(row).partition(" ")[0]),
        _Column("peak load", lambda row: figure(row["peak_load_factor"])),
        plain("TTFT p99 ms", _ttft),
        plain("TPOT p99 ms", lambda row: _ms(row, "tpot_p99_s")),
        _Column("goodput/GPU", lambda row: figure(row["goodput_rps_per_gpu"])),
        plain("head-room", _room),
    ]


def _natural_width(header: Sequence[str], body: Sequence[Sequence[str]]) -> int:
    """Columns that the table takes if nothing in it is wrapped."""
    return sum(max(map(len, column)) + 3 for column in zip(header, *body))


def _indented(line: str, width: int | None) -> str:
    """A line of text under a title: wrapped between words on a terminal, whole elsewhere."""
    return (
        f"  {line}\n"
        if width is None
        else textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False) + "\n"
    )


def _attained(row: Mapping[str, Any]) -> str:
    low, high = row["slo_attainment_interval"]
    return f"{row['slo_attainment'] * 100:.2f} [{low * 100:.2f}, {high * 100:.2f}]"


def _load(row: Mapping[str, Any]) -> str:
    if row["load_factor"] is None:
        return "-"
    low, high = row["load_factor_interval"]
    return f"{row['load_factor']:.2f} [{low:.2f}, {high:.2f}]"


def _ms(row: Mapping[str, Any], key: str) -> str:
    return "-" if row[key] is None else figure(row[key] * 1e3)


def _ttft(row: Mapping[str, Any]) -> str:
    if row["ttft_p99_range_s"] is None:
        return _ms(row, "ttft_p99_s")
    return " to ".join(figure(edge * 1e3) for edge in row["ttft_p99_range_s"])


def _room(row: Mapping[str, Any]) -> str:
    return "" if row["headroom"] is None else f"+{row['headroom'] * 100:.0f} %"
