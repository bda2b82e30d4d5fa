"""The commands of validation: import, compare and accuracy. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from serving.errors import InputError

THE_ANSWER_IS_NO = 1


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    app.command("import")(import_run)
    app.command("compare")(compare_runs)
    app.command("accuracy")(measure_accuracy)


def import_run(
    format_name: Annotated[str, typer.Argument(metavar="FORMAT", help="vllm-bench, aiperf, guidellm, vllm-requests, mlperf-loadgen, step-log, or auto.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What the load generator or the engine wrote.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the run directory here.")],
    select: Annotated[int | None, typer.Option(metavar="N", help="Which benchmark of a file that holds several, from 0.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary.json that was written.")] = False,
) -> None:
    """Turn the file of a load generator or an engine into a run directory."""
    from serving.records import open_run, refuse_unless_replaceable, summary_json
    from validate.importers import FORMATS, detect, import_file

    if format_name == "auto":
        found = detect(file)
        if found is None:
            raise InputError(str(file), "is of no known format", "choose from: " + ", ".join(FORMATS))
        format_name = found
    refuse_unless_replaceable(out)
    run = import_file(format_name, file, out, select)
    if as_json:
        sys.stdout.write(summary_json(open_run(out).summary))
        return
    parts = [f"{len(run.served)} requests" if run.served else "statistics", *([f"{len(run.steps)} steps"] if run.steps else [])]
    print(f"{out}: {' and '.join(parts)} from {format_name}")
    for note in run.notes:
        print("note:", note, file=sys.stderr)


def compare_runs(
    directories: Annotated[list[Path], typer.Argument(metavar="REAL_DIR... SIM_DIR", help="One or more repeats of the real run, then the simulated one.")],
    gate: Annotated[float | None, typer.Option(metavar="F", help="Exit with 1 when an error exceeds this fraction (0.05 is 5 %).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Error of a simulated run against a real one, per metric and statistic."""
    if len(directories) < 2:
        raise InputError("compare", "needs a real and a simulated run directory", "twinserve compare REAL_DIR SIM_DIR")
    if gate is not None and not 0 <= gate < float("inf"):
        raise InputError("--gate", f"{gate:g} is no fraction of at least 0")
    from validate.compare import compare, print_comparison

    comparison = compare(directories[:-1], directories[-1])
    if as_json:
        print(json.dumps(comparison.as_json(gate), indent=2, allow_nan=False))
    else:
        print_comparison(comparison, gate, sys.stdout)
    if gate is not None and comparison.exceeding(gate):
        raise typer.Exit(THE_ANSWER_IS_NO)


def measure_accuracy(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Measured runs, with the profiles of their GPUs beside or above them.")],
    fit: Annotated[bool, typer.Option(help="Also fit on one half of each run or table and judge on the other.")] = True,
    sample: Annotated[int | None, typer.Option(metavar="N", min=2, help="Take N rows of each group of a table of servers, not all.")] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Processes for tables of servers.")] = 2,
    gate: Annotated[float | None, typer.Option(metavar="F", help="Exit with 1 when an error exceeds this fraction (0.05 is 5 %).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Replay every measured run in a folder and print how far off the simulator is."""
    if gate is not None and not 0 <= gate < float("inf"):
        raise InputError("--gate", f"{gate:g} is no fraction of at least 0")
    from serving.progress import ProgressBar
    from validate import accuracy
    from validate.accuracy_tables import print_rows

    with ProgressBar("replaying", "simulations") as bar:
        rows = accuracy.accuracy(folder, fit=fit, jobs=jobs, sample=sample, progress=bar if sys.stderr.isatty() else None)
    if as_json:
        print(accuracy.as_json(rows))
    else:
        print_rows(rows, gate, sys.stdout)
    if gate is not None and accuracy.exceeding(rows, gate):
        raise typer.Exit(THE_ANSWER_IS_NO)
