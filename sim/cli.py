"""The commands of the simulator: run, list, schema. Heavy imports happen inside them."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import InputError, nearest

INTERRUPTED = 130
LISTS = ("gpus", "llms", "topologies", "policies", "scenarios", "latency-models")


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    app.command("run")(run)
    app.command("list")(list_names)
    app.command("schema")(schema)


def run(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or a name from `twinserve list scenarios`.")],
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay this trace instead of the scenario's arrivals and lengths.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of every random stream, instead of the scenario's.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run directory here.")] = None,
    stepwise: Annotated[bool, typer.Option("--stepwise", help="One event per step: slow, and exactly equal.")] = False,
    audit: Annotated[float, typer.Option(metavar="P", help="Re-plan this fraction of the skipped steps, to catch a policy that breaks its word.")] = 0.0,
    no_records: Annotated[bool, typer.Option("--no-records", help="Write no table of requests and steps.")] = False,
    trace_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Perfetto/Chrome timeline of the run (.gz compresses).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
) -> None:
    """Simulate a scenario and print what its users saw."""
    from serving.records import refuse_unless_replaceable, summary_json
    from serving.scenario import load

    if not 0 <= audit <= 1:
        raise InputError("--audit", f"{audit:g} is no fraction between 0 and 1")
    if trace_out is not None and no_records:
        raise InputError("--trace-out", "draws what --no-records leaves out", "give one of the two")
    loaded = load(scenario, overrides or (), seed, trace)
    if out is not None:
        refuse_unless_replaceable(out)
    from serving.progress import ProgressBar
    from sim.run import simulate  # last: a mistake above is told without waiting for it

    spare_the_collector()
    with ProgressBar() as bar, _records_at(out, trace_out) as folder:
        progress = bar if sys.stderr.isatty() else None
        result = simulate(loaded, out=folder, records=not no_records, stepwise=stepwise, audit=audit, progress=progress)
        if trace_out is not None:
            from sim.trace_out import write_run_trace

            write_run_trace(folder, trace_out)
    for reason, count in result.skipped.items():
        print(f"note: {count:,} rows of the trace were left out: {reason}", file=sys.stderr)
    if as_json:
        sys.stdout.write(summary_json(result.summary))
    else:
        from sim.tables import print_run

        print_run(result.summary, result.fleet, loaded.slo, sys.stdout)
    if result.partial:
        print("interrupted: these are the figures so far" + (f"; {out} is marked partial" if out else ""), file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _records_at(out: Path | None, trace_out: Path | None) -> Iterator[Path | None]:
    """Yield where the run goes: a folder that lives as long as needed when only its timeline is wanted."""
    if out is not None or trace_out is None:
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "run"


def list_names(kind: Annotated[str, typer.Argument(help="What to list: " + ", ".join(LISTS) + ".")]) -> None:
    """Names that a scenario may use. With their facts on a terminal, one a line elsewhere; a policy with its kind before it."""
    if kind not in LISTS:
        raise InputError("list", f"there is no list of '{kind}'", nearest(kind, LISTS))
    from hwmodels.cli import tables

    if kind in tables() and sys.stdout.isatty():
        from sim.tables import print_facts

        header, rows = tables()[kind]
        print_facts(header, rows(), sys.stdout)
        return
    for name in _names(kind):
        print(name)


def schema() -> None:
    """JSON Schema of a scenario, for editors."""
    from serving.scenario import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def spare_the_collector() -> None:
    """Let the garbage collector forget what is loaded and look less often: a run makes millions of tuples and no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def _names(kind: str) -> list[str]:
    if kind == "policies":
        from serving import policies

        return [f"{decision} {name}" for decision in policies.kinds() for name in policies.names(decision)]
    if kind == "scenarios":
        from serving import scenario

        return scenario.names()
    if kind == "latency-models":
        from hwmodels.latency import MODELS

        return sorted(MODELS)
    from serving import catalog

    return catalog.names(kind)
