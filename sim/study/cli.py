"""The commands `sweep` and `plan`. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.errors import InputError

if TYPE_CHECKING:
    from serving.scenario import Scenario
    from sim.study.vary import Setting

INTERRUPTED = 130

ScenarioFile = Annotated[str, typer.Argument(help="A YAML file, or a name from `twinserve list scenarios`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key; may be repeated.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of every random stream, instead of the scenario's.")]
Backend = Annotated[str, typer.Option(metavar="NAME", help="Where points run: local (processes) or ray.")]
Jobs = Annotated[int | None, typer.Option(metavar="N", help="Points that run at once; default: the CPUs. 1 runs them in this process.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    app.command("sweep")(sweep)
    app.command("plan")(plan)


def sweep(
    scenario: ScenarioFile,
    vary: Annotated[list[str] | None, typer.Option(metavar="PATH=VALUES", help="v1,v2,... or start:stop:steps or log:start:stop:steps; may be repeated: a grid.")] = None,
    random: Annotated[int | None, typer.Option(metavar="N", help="Draw N points instead of the whole grid; ranges need no steps then.")] = None,
    listed: Annotated[Path | None, typer.Option("--list", metavar="FILE", help="Points from a CSV (header: paths) or YAML list of mappings.")] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="Replications of every point, seeds upwards from the scenario's.")] = 1,
    overrides: Overrides = None,
    seed: Seed = None,
    backend: Backend = "local",
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep finished points here, to go on after an interruption, and the tables.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a scenario at many settings and print one table."""
    from serving.scenario import load
    from sim.cli import spare_the_collector
    from sim.study.executors import open_pool
    from sim.study.points import Points
    from sim.study.sweep import NOTE, TABLES, finished, points_of, run_sweep, write_tables

    base = load(scenario, overrides or (), seed)
    settings = _settings(base, vary or [], random, listed)
    points = points_of(base, settings, seeds, _folder(scenario))
    note = {"scenario": base.resolved(), "vary": vary or [], "random": random, "list": None if listed is None else str(listed), "seeds": seeds}
    spare_the_collector()
    with Points(out, (*TABLES, NOTE)) as store:
        try:
            with open_pool(backend, jobs) as use:
                done = _with_bar(lambda bar: run_sweep(points, use, store, bar), "sweeping")
        except KeyboardInterrupt:
            rest = finished(points, store)
            if out is not None and rest.rows:
                write_tables(rest, out, note)
            _interrupted(f"{len(rest.rows)} of {len(points)} points are finished", out)
    if out is not None:
        write_tables(done, out, note)
        print(f"{out}: {len(done.rows)} points; `twinserve report {out} --out sweep.html` plots them", file=sys.stderr)
    _print_sweep(base.name, done, as_json)


def _settings(base: Scenario, vary: list[str], random: int | None, listed: Path | None) -> list[Setting]:
    from sim.study.sweep import check_paths, plain_at
    from sim.study.vary import dimension, grid, listed_points, random_points

    if not vary and listed is None:
        raise InputError("sweep", "has nothing to vary", "give --vary PATH=VALUES, or --list FILE")
    raw = base.resolved()
    dimensions = [dimension(text, plain_at(raw, text.partition("=")[0].strip())) for text in vary]
    paths = [each.path for each in dimensions]
    rows: list[Setting] = [{}] if listed is None else listed_points(listed)
    check_paths(raw, [*paths, *(path for row in rows for path in row)])
    twice = [path for path in paths if paths.count(path) > 1 or any(path in row for row in rows)]
    if twice:
        raise InputError(f"--vary {twice[0]}", "is varied twice")
    if random is None:
        varied = grid(dimensions)
    else:
        whole = {each.path: isinstance(plain_at(raw, each.path), int) for each in dimensions}
        varied = random_points(dimensions, random, seed=base.seed, whole=whole)
    return [{**row, **setting} for row in rows for setting in varied]


def _print_sweep(name: str, done: Any, as_json: bool) -> None:
    from sim.study.tables import print_sweep

    for line in done.failed:
        print(f"failed: {line}", file=sys.stderr)
    refused = [row["not_run"] for row in done.rows if row["not_run"] is not None]
    if len(refused) == len(done.rows):
        raise InputError("sweep", f"none of {len(refused)} points could run; the first: {refused[0]}")
    if as_json:
        sys.stdout.write(json.dumps({"scenario": name, "varied": done.paths, "points": done.rows}, indent=2, allow_nan=False) + "\n")
    else:
        print_sweep(name, done, sys.stdout)


def plan(
    scenario: ScenarioFile,
    overrides: Overrides = None,
    seed: Seed = None,
    top: Annotated[int | None, typer.Option(metavar="N", help="Cheapest fleets to work out in full, instead of the scenario's plan.top.")] = None,
    backend: Backend = "local",
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep finished evaluations here, to go on after an interruption, and plan.json.")] = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest fleet that meets the scenario's objectives. Exit code 1 when there is none."""
    from serving.scenario import load
    from sim.cli import spare_the_collector
    from sim.study.executors import open_pool
    from sim.study.plan import FILE, make_plan
    from sim.study.points import Points, replace_file
    from sim.study.tables import print_plan

    base = load(scenario, overrides or (), seed)
    if top is not None and top < 1:
        raise InputError("--top", "must be at least 1", f"got {top}")
    spare_the_collector()
    with Points(out, (FILE,)) as store:
        try:
            with open_pool(backend, jobs) as use:
                done = _with_bar(lambda bar: make_plan(base, use, store, top=top, progress=bar, folder=_folder(scenario)), "planning")
        except KeyboardInterrupt:
            _interrupted(f"{len(store)} evaluations are finished", out)
    text = json.dumps(done, indent=2, allow_nan=False) + "\n"
    if out is not None:
        replace_file(out / FILE, text.encode())
        print(f"{out}: `twinserve report {out} --out plan.html` plots it", file=sys.stderr)
    if as_json:
        sys.stdout.write(text)
    else:
        print_plan(done, sys.stdout)
    if not done["plans"] or not done["plans"][0]["feasible"]:
        raise typer.Exit(1)


def _folder(scenario: str) -> Path | None:
    return Path(scenario).parent if Path(scenario).is_file() else None


def _with_bar(work: Any, doing: str) -> Any:
    from serving.progress import ProgressBar

    with ProgressBar(doing, "points") as bar:
        return work(bar if sys.stderr.isatty() else None)


def _interrupted(state: str, out: Path | None) -> None:
    kept = f"kept in {out}: the same command goes on from there" if out is not None else "lost: --out DIR would have kept them"
    print(f"interrupted: {state}, {kept}", file=sys.stderr)
    raise typer.Exit(INTERRUPTED)
