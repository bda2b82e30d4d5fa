"""The commands that judge runs of the real engine: calibrate, parity. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from validate.calibrate import Calibration

THE_ANSWER_IS_NO, WRONG_INPUT = 1, 2


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command("calibrate")(calibrate_runs)
    app.command("parity")(check_parity)


def calibrate_runs(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs or profiles of one device, as `engine run` and `engine profile` write them.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the fit here; `latency: {name: fitted, file: FILE}` uses it.")],
    scenario: Annotated[
        str | None, typer.Option(metavar="SCENARIO", help="What served a run that has requests and no steps: fit its GPU's efficiencies and host time.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Decides which steps are held out.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Fit a latency model to measured steps, and say how far off it is on steps held out."""
    if scenario is not None:
        _calibrate_single(folders, scenario, out, seed, as_json)
        return
    from validate.calibrate import calibrate, write

    result = calibrate(folders, seed=seed)
    if result.accepted:
        write(result.fit, out)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    elif result.accepted:
        _print(result, out)
    if not result.accepted:
        print(f"error: refused: {result.reason}", file=sys.stderr)
        raise typer.Exit(WRONG_INPUT)


def _calibrate_single(folders: list[Path], scenario: str, out: Path, seed: int, as_json: bool) -> None:
    """Fit three factors to the requests of one run; ``out`` is then a file for ``cluster.gpu``."""
    from serving.errors import InputError
    from serving.scenario import load
    from validate.single_run import calibrate_run, write

    if len(folders) != 1:
        raise InputError("calibrate", f"--scenario fits one run and {len(folders)} are given")
    result = calibrate_run(folders[0], load(scenario), seed=seed)
    if result.accepted:
        write(result, out)
    if as_json:
        print(json.dumps(result.as_json(), indent=2))
    elif result.accepted:
        print(f"fitted on {result.trained_on} requests (95 % interval)")
        for name, (value, low, high) in result.factors.items():
            print(f"  {name:<22}{value:>9.4g}  {low:.4g} to {high:.4g}")
        for metric, error in result.holdout.items():
            print(f"  mean {metric} of the other requests {error:>+7.1%}")
        print(f"wrote {out}: name it as cluster.gpu, with the roofline latency model")
    if not result.accepted:
        print(f"error: refused: {result.reason}", file=sys.stderr)
        raise typer.Exit(WRONG_INPUT)


def _print(result: Calibration, out: Path) -> None:
    print(f"{result.train_steps} steps fitted; the others are off by (mean absolute, 95 % interval)")
    rows = [("all", result.mape, None), *((name, found, steps) for name, (found, steps) in result.by_regime.items())]
    for name, found, steps in rows:
        print(f"  {name:<8}{found.estimate:>7.1%}  {found.low:.1%} to {found.high:.1%}" + (f"  {steps} steps" if steps else ""))
    print(f"  total   {result.bias:>+7.1%}")
    print(f"wrote {out}")


def check_parity(
    folder: Annotated[Path, typer.Argument(metavar="ENGINE_RUN_DIR", help="A run that recorded its plans, as `engine run --out` does.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a sentence.")] = False,
) -> None:
    """Make every decision of an engine's run again from its recorded instants. Exit code 1 when one differs."""
    from validate.parity import parity

    result = parity(folder)
    if as_json:
        found = {"plans": result.plans, "differing_plans": result.differing_plans, "first_difference": result.first_difference}
        print(json.dumps(found, indent=2, default=str))
    elif result.first_difference is None:
        print(f"all {result.plans} plans are the same")
    else:
        first = result.first_difference
        print(f"{result.differing_plans} of {result.plans} plans differ, first in step {first['step']}: {first['field']}")
        print(f"  engine: {first['engine']}\n  replay: {first['replay']}")
    if result.differing_plans:
        raise typer.Exit(THE_ANSWER_IS_NO)
