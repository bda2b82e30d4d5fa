"""The command: one Typer app made of each room's ``cli.py``, of which only the one that is asked for gets imported."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Annotated

import typer

from serving.errors import BrokenPolicyError, InputError

# command -> (the module whose ``register(app)`` adds it, its line in the overview)
COMMANDS = {
    "run": ("sim.cli", "Simulate a scenario and print what its users saw."),
    "memory": ("hwmodels.cli", "How much KV cache a language model leaves on a GPU, and what limits it."),
    "list": ("sim.cli", "Names that a scenario may use."),
    "sweep": ("sim.study.cli", "Simulate a scenario at many settings: grids, lists, random draws."),
    "plan": ("sim.study.cli", "Find the cheapest fleet that meets a scenario's objectives."),
    "serve": ("sim.serve", "Serve a scenario's fleet over HTTP, in real time."),
    "report": ("validate.report.cli", "Turn runs into a page, an explanation or a timeline."),
    "prove": ("validate.report.cli", "Prove or refute the constraints that a deployment declares."),
    "import": ("validate.cli", "Turn the file of a load generator or an engine into a run directory."),
    "compare": ("validate.cli", "Error of a simulated run against a real one, per metric and statistic."),
    "accuracy": ("validate.cli", "How far off the simulator is from every measured run in a folder."),
    "engine": ("engine.cli", "The real engine: run a scenario on it, profile it, serve with it."),
    "calibrate": ("validate.engine_cli", "Fit a latency model to measured steps, and say how far off it is on steps held out."),
    "parity": ("validate.engine_cli", "Make every decision of an engine's run again from its recorded instants."),
    "regress": ("validate.regress.cli", "Whether a candidate policy is worse than the one in use, on a suite of scenarios."),
    "schema": ("sim.cli", "JSON Schema of a scenario, for editors."),
}
WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
_USAGE_ERROR = typer.BadParameter.__base__  # click's UsageError: some versions of typer carry click inside themselves


def build(asked: str | None) -> typer.Typer:
    """Return the app: the command ``asked`` in full, or, when it is none of ours, all of them by their overview lines."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(help="Simulate LLM serving with the scheduler that also runs in a real engine.")(_top)
    if asked in COMMANDS:
        importlib.import_module(COMMANDS[asked][0]).register(app)
    else:
        for name, (_, line) in COMMANDS.items():
            app.command(name, help=line)(_overview_line)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 the answer is no, 2 the input is wrong, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    _mend_streams()
    asked = next((word for word in arguments if not word.startswith("-")), None)
    try:
        code = build(asked)(arguments, prog_name="twinserve", standalone_mode=False)
        sys.stdout.flush()
    except (InputError, BrokenPolicyError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return WRONG_INPUT
    except _USAGE_ERROR as error:
        error.show()
        return WRONG_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_has_gone()
    except OSError as error:  # what the disk or the system says of a file that the user named
        if _place_in_policy(error):
            return _blame_policy(error)
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        print("error:", " ".join(f"{error.filename or 'the output'}: {error.strerror}".split()), file=sys.stderr)
        return WRONG_INPUT
    except SystemExit as stop:  # click's own answer to a broken pipe is 1, which here would mean "the answer is no"
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_has_gone()
        return _blame_policy(stop)
    except Exception as error:
        return _blame_policy(error)
    return code if isinstance(code, int) else 0


def _mend_streams() -> None:
    """Let text be printed whatever the terminal's encoding, and go nowhere where the caller closed the stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (open until the process ends)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _blame_policy(error: BaseException) -> int:
    """Say in one line what a user's policy file raised, with its file and line; anything else is ours, and is raised on."""
    found = _place_in_policy(error)
    if found is None:
        raise error
    said = " ".join(str(error).split())[:300]
    print(f"error: {found} failed: {type(error).__name__}" + (f": {said}" if said else ""), file=sys.stderr)
    return WRONG_INPUT


def _place_in_policy(error: BaseException) -> str | None:
    """Where in a user's policy file ``error`` came from, the innermost frame; None when there is no such file on the way."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith("twinserve_user_policy_"):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}: policy method '{trace.tb_frame.f_code.co_name}'"
        trace = trace.tb_next
    return found


def _reader_has_gone() -> int:
    """Give the interpreter somewhere to flush to, or it would complain on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
    return BROKEN_PIPE


def _print_version(asked: bool) -> None:
    if asked:
        from serving.version import version

        print("twinserve", version())
        raise typer.Exit


def _top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Hold the options that belong to no command."""


def _overview_line() -> None:
    """Stand in the overview for a command whose module is not imported; never called."""


if __name__ == "__main__":
    sys.exit(main())
