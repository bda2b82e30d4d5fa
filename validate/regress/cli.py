"""The command regress. Heavy imports happen inside it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.errors import InputError
from serving.files import write_whole

if TYPE_CHECKING:
    from validate.regress.run import Report

THE_ANSWER_IS_NO = 1
_POLICY = "KIND=POLICY, where POLICY is a name, {json options with the key name}, file.py:Class or file.py:Class@GIT_REV; may be repeated."


def register(app: typer.Typer) -> None:
    """Add this package's command to the app."""
    app.command("regress")(regress)


def regress(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="`default`, or a folder of scenarios.")],
    baseline: Annotated[list[str], typer.Option(metavar="KIND=POLICY", help="What is in use now: " + _POLICY)],
    candidate: Annotated[list[str], typer.Option(metavar="KIND=POLICY", help="What might replace it.")],
    replications: Annotated[int, typer.Option(metavar="N", help="Pairs of runs for each scenario.")] = 24,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Worker processes; default: one for each core.")] = None,
    effect: Annotated[float, typer.Option(metavar="F", help="Changes smaller than this fraction are tolerated.")] = 0.01,
    time_limit: Annotated[float, typer.Option(metavar="S", help="CPU seconds that one run may take.")] = 15.0,
    traces: Annotated[Path, typer.Option(metavar="DIR", help="Where the workloads that break a property are written.")] = Path("regress-traces"),
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Append a Markdown summary, as GitHub's step summary wants.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Compare a candidate policy with a baseline on a suite of scenarios; exit with 1 when it is worse or breaks a property."""
    if replications < 3:
        raise InputError("--replications", f"{replications} pairs cannot show a spread", "at least 3; 24 to see a change of 2 %")
    if jobs is not None and jobs < 1:
        raise InputError("--jobs", f"must be at least 1, got {jobs}")
    if not 0 <= effect < 1 or not time_limit > 0:
        raise InputError("--effect, --time-limit", "need a fraction below 1 and a positive time")
    from serving.progress import ProgressBar
    from sim.study.executors import default_jobs
    from validate.regress import choice, render, terminal
    from validate.regress.run import Settings, compare
    from validate.regress.suite import load_suite

    loaded = load_suite(suite)
    with tempfile.TemporaryDirectory(prefix="twinserve-policies-") as checkout:
        sides = [[choice.parse(text, where, Path(checkout)) for text in texts] for where, texts in (("--baseline", baseline), ("--candidate", candidate))]
        choice.same_kinds(*sides)
        settings = Settings(replications, jobs or default_jobs(), effect=effect, limit_s=time_limit)
        with ProgressBar("comparing", "runs") as bar:
            report = compare(loaded, *sides, settings, bar if sys.stderr.isatty() else None)
        files = _write_traces(report, traces)
    if junit is not None:
        _write(junit, render.junit(report, files))
    if markdown is not None:
        _write(markdown, render.markdown(report, files), append=True)
    if as_json:
        sys.stdout.write(render.as_json(report, files))
    else:
        terminal.print_report(report, files, sys.stdout)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        stream = sys.stderr if as_json else sys.stdout
        stream.writelines(line + "\n" for line in render.annotations(report, files))
    if report.regressed:
        raise typer.Exit(THE_ANSWER_IS_NO)
    for failure in render.failed_baselines(report):
        raise InputError("--baseline", f"{failure.policy} fails in scenario {failure.scenario}: {failure.fault}", "nothing was compared there")


def _write_traces(report: Report, folder: Path) -> dict[str, list[str]]:
    """Write what replays each broken property; returns the files by property, the scenario first."""
    from validate.regress.properties import files_of

    written: dict[str, list[str]] = {}
    for finding in report.properties:
        if finding.broken:
            files = list(files_of(finding, folder))
            for path, text in files:
                _write(path, text)
            written[finding.name] = [str(path) for path, _ in reversed(files)]
    return written


def _write(path: Path, text: str, *, append: bool = False) -> None:
    if not append:
        write_whole(path, text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror}") from None
