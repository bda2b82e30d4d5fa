"""The commands `report` and `prove`. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import InputError, nearest


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    app.command("report")(report)
    app.command("prove")(prove)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories (two: real against simulated), or one sweep or plan.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the report here: one file, no network needed.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print why the slowest requests were slow.")] = False,
    metric: Annotated[str, typer.Option(metavar="NAME", help="What --explain splits: all, ttft_s, tpot_s or e2e_s.")] = "all",
    quantile: Annotated[float, typer.Option(metavar="Q", help="--explain takes the requests at or beyond this quantile.")] = 0.99,
    trace_out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Perfetto/Chrome timeline of the run (.gz compresses).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --explain: print the rows as JSON.")] = False,
) -> None:
    """Turn runs into a page people look at, an explanation of their slowest requests, or a timeline for Perfetto."""
    if out is None and not explain and trace_out is None:
        raise InputError("report", "has nothing to make", "give --out FILE.html, --explain or --trace-out FILE")
    if out is not None:
        from validate.report.build import build
        from validate.report.page import write

        started = time.perf_counter()
        size = write(build(folders), out)
        print(f"{out}: {size / 1e6:.1f} MB in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    if trace_out is not None:
        from sim.trace_out import write_run_trace

        print(f"{trace_out}: {write_run_trace(_only(folders, '--trace-out'), trace_out):,} events", file=sys.stderr)
    if explain:
        _explain(_only(folders, "--explain"), metric, quantile, as_json)


def _only(folders: list[Path], flag: str) -> Path:
    if len(folders) != 1:
        raise InputError(flag, f"takes one run directory, not {len(folders)}")
    return folders[0]


def _explain(folder: Path, metric: str, quantile: float, as_json: bool) -> None:
    from sim.study.tables import write as write_table
    from validate.explain import METRICS, explain_all
    from validate.report.headline import cause_table
    from validate.run_data import read_run

    if metric not in ("all", *METRICS):
        raise InputError("--metric", f"'{metric}' cannot be explained", nearest(metric, ("all", *METRICS)))
    if not 0 < quantile < 1:
        raise InputError("--quantile", f"{quantile:g} is not between 0 and 1")
    causes = explain_all(read_run(folder), METRICS if metric == "all" else (metric,), quantile)
    if as_json:
        rows = {name: [cause._asdict() for cause in ranked] for name, ranked in causes.items()}
        sys.stdout.write(json.dumps({"quantile": quantile, "metrics": rows}, indent=2) + "\n")
        return
    for name, ranked in causes.items():
        table = cause_table(name, ranked)
        write_table(sys.stdout, [table.title], table.columns, table.rows, words=table.words)
        sys.stdout.write("\n")


def prove(
    file: Annotated[Path, typer.Argument(metavar="CONSTRAINTS", help="A YAML file of variables, assumptions and requirements.")],
    scenario: Annotated[str | None, typer.Argument(metavar="[SCENARIO]", help="The deployment whose facts the file may name.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key of the scenario; may be repeated.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Judge the age of measurements on this day instead of today.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Prove again whenever the file changes, until interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Prove or refute the constraints that a deployment declares; exit code 1 unless all are proved."""
    from validate.constraints import Watched, facts_of
    from validate.proofs import prove as decide

    day = _day(on)
    facts = {}
    if scenario is not None:
        from serving.scenario import load

        facts = facts_of(load(scenario, overrides or ()))
    elif overrides:
        raise InputError("--set", "overrides nothing: no scenario was given")
    watched = Watched(file, facts, day)
    findings = decide(watched.current(), day)
    _print_findings(findings, as_json)
    while watch:
        before = watched.current(), watched.error
        time.sleep(0.2)
        current = watched.current()
        if watched.error is not None and watched.error is not before[1]:
            print("error:", watched.error, "- the last good file stays in force", file=sys.stderr)
        elif current is not before[0]:
            findings = decide(current, day)
            _print_findings(findings, as_json)
    if any(finding.status != "proved" for finding in findings):
        raise typer.Exit(1)


def _day(text: str | None):
    import datetime as dt

    try:
        return dt.date.today() if text is None else dt.date.fromisoformat(text)
    except ValueError as error:
        raise InputError("--on", f"'{text}' is no date", "as in 2026-08-01") from error


def _print_findings(findings: list, as_json: bool) -> None:
    if as_json:
        rows = [
            {**finding._asdict(), "counterexample": finding.counterexample and {name: float(value) for name, value in finding.counterexample.items()}}
            for finding in findings
        ]
        sys.stdout.write(json.dumps({"proved": all(f.status == "proved" for f in findings), "findings": rows}, indent=2) + "\n")
        return
    width = max(len(finding.requirement) for finding in findings)
    for finding in findings:
        print(f"{finding.status:8} {finding.requirement:{width}}  confidence {finding.confidence:.2f}")
        if finding.counterexample is not None:
            values = ", ".join(f"{name} = {float(value):.6g}" for name, value in finding.counterexample.items())
            print(f"         {'divides by zero' if finding.undefined else 'fails'} at {values}")
