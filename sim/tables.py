"""The table of a run for a terminal: what users saw, what the fleet did, and what holds it back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from sim.bottleneck import Fleet, bottleneck, load_words
from sim.front_tables import Rows, front_tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from serving.scenario import Slo, Targets

_LATENCIES = (
    ("Time to first token", "ttft_s"),
    ("Time per output token", "tpot_s"),
    ("Inter-token latency", "itl_s"),
    ("End to end", "e2e_s"),
    ("In the queue", "queue_s"),
)
_STATISTICS = ("mean", "p50", "p90", "p99", "max")


def print_run(summary: Mapping[str, Any], fleet: Fleet, slo: Slo, file: IO[str], width: int | None = None) -> None:
    """Print a run's summary against the objectives ``slo``; ``width`` overrides the terminal's.

    Where ``file`` is no terminal the text is plain ASCII, 80 columns wide: the same bytes for the same run.
    """
    console = console_for(file, width)
    plain = not console.is_terminal
    has_objectives = any(limit != math.inf for name in summary["slo_attainment"]["by_class"] for limit in slo.targets(name))
    with console.capture() as printed:
        _print_heading(console, summary, fleet, "x" if plain else "\u00d7")
        for table in (_latency_table(summary, plain), _fleet_table(summary, plain), _slo_table(summary, slo, plain) if has_objectives else None):
            if table is not None:
                console.print()
                console.print(table)
        for rows in front_tables(summary):
            console.print()
            console.print(_front_table(rows, plain))
        console.print()
        console.print(bottleneck(summary, fleet, slo), highlight=False)
    file.writelines(line.rstrip() + "\n" for line in printed.get().splitlines())


def _print_heading(console: Console, summary: Mapping[str, Any], fleet: Fleet, times: str) -> None:
    from rich.markup import escape

    shape = f" (TP {fleet.tensor_parallel})" if fleet.tensor_parallel > 1 else ""
    if fleet.gpus_per_replica != fleet.tensor_parallel:
        shape = f" ({fleet.gpus_per_replica} GPUs each)"
    gpus = f"{fleet.replicas} {times} {fleet.gpu}{shape}"
    console.print(f"[bold]{escape(summary['scenario'])}[/bold]: {escape(fleet.llm)} on {escape(gpus)}, seed {summary['seed']}", highlight=False)
    requests = summary["requests"]
    failures = ", ".join(f"{requests[name]:,} {name}" for name in ("rejected", "failed", "preempted") if requests[name])
    counts = f"{requests['completed']:,} of {requests['arrived']:,} requests completed in {summary['duration_s']:,.1f} s"
    console.print(counts + (f"; {failures}" if failures else ""), highlight=False)


def print_facts(header: Sequence[str], rows: Iterable[Sequence[str]], file: IO[str]) -> None:
    """Print a table of catalogue facts: the name first, the rest to the right."""
    from rich.markup import escape

    console = console_for(file)
    table = _table(not console.is_terminal)
    lines = list(rows)
    for title, cells in zip(header, zip(*lines)):
        table.add_column(escape(title), justify="left" if any(cell[-1:].isalpha() or " " in cell for cell in cells) else "right")
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)


def console_for(file: IO[str], width: int | None = None) -> Console:
    """Return a console for ``file``: 80 columns without colour where it is no terminal, whatever the environment says."""
    from rich.console import Console

    if file.isatty():
        return Console(file=file, width=width)
    return Console(file=file, width=width or 80, force_terminal=False, color_system=None, emoji=False)


def _table(plain: bool, **options: Any) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, **options)


def _latency_table(summary: Mapping[str, Any], plain: bool) -> Table:
    table = _table(plain)
    table.add_column("Latency")
    for statistic in _STATISTICS:
        table.add_column(statistic, justify="right")
    for label, key in _LATENCIES:
        values = summary[key]
        if values["mean"] is None:
            table.add_row(label, *["-"] * len(_STATISTICS))
            continue
        seconds = values["p99"] >= 2
        unit, scale = ("s", 1.0) if seconds else ("ms", 1e3)
        table.add_row(f"{label} [dim]({unit})[/dim]", *(_number(values[name] * scale) for name in _STATISTICS))
    return table


def _front_table(rows: Rows, plain: bool) -> Table:
    from rich.markup import escape

    table = _table(plain)
    for index, name in enumerate((rows.title if rows.columns[0] == "stage" and rows.words == 1 else rows.columns[0].capitalize(), *rows.columns[1:])):
        table.add_column(name, justify="left" if index < rows.words else "right", no_wrap=True)
    for row in rows.rows:
        table.add_row(*map(escape, row))
    return table


def _spread(summary: Mapping[str, Any]) -> bool:
    """Whether more than one kind of thing could saturate."""
    return "stages" in summary or "sites" in summary


def _fleet_table(summary: Mapping[str, Any], plain: bool) -> Table:
    table = _table(plain, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    kv = summary["kv_utilisation"]
    cost = summary["usd_per_million_output_tokens"]
    rho = summary["load_factor"]
    rows = (
        ("Requests", _rate(summary["requests_per_s"], "/s"), ""),
        ("Output tokens", _rate(summary["output_tokens_per_s"], "/s"), ""),
        ("Prompt tokens", _rate(summary["prompt_tokens_per_s"], "/s"), ""),
        ("Goodput", _rate(summary["goodput_rps"], "/s"), "requests that met every objective of their class"),
        ("Load factor" if plain else "Load factor \u03c1", "-" if rho is None else f"{rho:.2f}", "stages and sites have loads of their own" if _spread(summary) else load_words(rho)),
        ("GPUs busy", _share(summary["gpu_busy_fraction"]), ""),
        ("KV cache used", _share(kv["mean"]), f"on average, {_share(kv['max'])} at the fullest"),
        ("Prefix cache hits", _share(summary["prefix_cache_hit_rate"]), "of prompt tokens"),
        ("Preemptions", f"{summary['preemptions']:,}", ""),
        ("Cost", "-" if cost is None else f"${cost:,.2f}", "a million output tokens" if cost is not None else "the GPU has no price in the catalogue"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _slo_table(summary: Mapping[str, Any], slo: Slo, plain: bool) -> Table:
    from rich.markup import escape

    table = _table(plain)
    for name, justify in (("Class", "left"), ("Objective", "left"), ("attained", "right"), (f"asked {slo.attainment:.4g}", "left")):
        table.add_column(name, justify=justify)
    attained = summary["slo_attainment"]
    rows = [(name, _objective(slo.targets(name), plain), share) for name, share in attained["by_class"].items()]
    if len(rows) > 1:
        rows.append(("all", "", attained["overall"]))
    for name, objective, share in rows:
        verdict = "" if share is None else ("[green]met[/green]" if share >= slo.attainment else "[bold red]MISSED[/bold red]")
        table.add_row(escape(name), objective, "-" if share is None else f"{share:.2%}", verdict)
    return table


def _objective(targets: Targets, plain: bool) -> str:
    sign = "<=" if plain else "\u2264"
    limits = zip(("TTFT", "TPOT", "E2E"), targets)
    return ", ".join(f"{name} {sign} {limit_s * 1e3:g} ms" for name, limit_s in limits if limit_s != math.inf) or "none"


def _number(value: float) -> str:
    """Return three or so significant digits, with thousands separated."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else _number(value) + unit


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
