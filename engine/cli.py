"""The commands of the engine: run, profile. Heavy imports happen inside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serving.errors import InputError, nearest

if TYPE_CHECKING:
    from engine.clocks import Clock
    from engine.run import Engine

INTERRUPTED = 130
CLOCKS = ("real", "normalised")
HELP = "The real engine: run a scenario on it, profile it, serve with it."

Scenario = Annotated[str, typer.Argument(help="A YAML file, or a name from `twinserve list scenarios`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key; may be repeated.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of every random stream, instead of the scenario's.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="fp32, bf16 or fp16; auto: fp32 on a CPU, bf16 on a GPU.")]
Weights = Annotated[Path | None, typer.Option(metavar="DIR", help="A local folder of safetensors; default: random weights of the scenario's shape.")]
Adapters = Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of LoRA adapters, each a folder as PEFT writes it; default: random ones.")]
SkipExperts = Annotated[float, typer.Option(metavar="F", help="Leave out experts with less than this part of the largest share of a token's experts.")]
Attention = Annotated[str | None, typer.Option(metavar="NAME", help="Attention back end; default: triton on a GPU, torch on a CPU.")]
Eager = Annotated[bool, typer.Option("--eager", help="Capture no CUDA graphs.")]
Threads = Annotated[int, typer.Option(metavar="N", help="Threads of torch on a CPU.")]
ClockName = Annotated[str, typer.Option("--clock", metavar="NAME", help="real, or normalised by a reference step that every step is measured beside.")]
ReferenceMs = Annotated[float, typer.Option(metavar="MS", help="What the reference step takes on the normalised clock.")]


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    from engine.serve import serve  # it takes the options below

    engine = typer.Typer(no_args_is_help=True, help=HELP)
    engine.command("run")(run)
    engine.command("profile")(profile)
    engine.command("serve")(serve)
    app.add_typer(engine, name="engine")


def run(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run directory here, with every plan and step.")] = None,
    clock: ClockName = "real",
    reference_ms: ReferenceMs = 5.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = None,
    adapters: Adapters = None,
    attention: Attention = None,
    eager: Eager = False,
    threads: Threads = 1,
    skip_experts_below: SkipExperts = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
) -> None:
    """Serve a scenario on the real engine: arrivals at their times, lengths pinned."""
    from serving.records import refuse_unless_replaceable, summary_json
    from serving.scenario import load

    loaded = load(scenario, overrides or (), seed)
    _check_clock(clock, reference_ms)
    if out is not None:
        refuse_unless_replaceable(out)
    from engine.build import Choices, build_engine
    from engine.measure import spare_the_collector
    from engine.profile import today
    from engine.run import serve_scenario
    from serving.progress import ProgressBar

    engine = build_engine(loaded, Choices(device, dtype, weights, attention, eager, threads, adapters, skip_experts_below))
    engine, chosen = _clocked(engine, clock, reference_ms)
    with spare_the_collector(), ProgressBar("serving") as bar:
        expected = loaded.workload.requests
        progress = (lambda left: bar(left, expected)) if sys.stderr.isatty() else None
        result = serve_scenario(loaded, engine, chosen, out=out, progress=progress, measured_on=today())
    if as_json:
        sys.stdout.write(summary_json(result.summary))
    else:
        from engine.tables import print_run

        print_run(result.summary, engine.device, sys.stdout)
    if result.partial:
        print("interrupted: these are the figures so far" + (f"; {out} is marked partial" if out else ""), file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def profile(
    scenario: Scenario,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Write the measured steps here, as a run directory that `calibrate` reads.")],
    overrides: Overrides = None,
    seed: Seed = None,
    budget_s: Annotated[float, typer.Option(metavar="S", help="Stop after this many seconds.")] = 120.0,
    target: Annotated[float, typer.Option(metavar="F", help="Repeat a shape until the 95 % interval of its mean is within this fraction.")] = 0.05,
    clock: ClockName = "normalised",
    reference_ms: ReferenceMs = 5.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = None,
    attention: Attention = None,
    eager: Eager = False,
    threads: Threads = 1,
) -> None:
    """Measure a designed set of step shapes within the scenario's limits. Run it again to go on where it was interrupted."""
    from serving.records import refuse_unless_replaceable
    from serving.scenario import load

    loaded = load(scenario, overrides or (), seed)
    _check_clock(clock, reference_ms)
    if not 0 < target < 1:
        raise InputError("--target", f"{target:g} is no fraction between 0 and 1")
    if not 0 < budget_s < float("inf"):
        raise InputError("--budget-s", f"{budget_s:g} is no number of seconds above 0")
    refuse_unless_replaceable(out)
    from engine.build import Choices, build_engine
    from engine.measure import measure, spare_the_collector
    from engine.profile import designed_cases, write_run
    from engine.tables import print_profile
    from serving.progress import ProgressBar

    engine = build_engine(loaded, Choices(device, dtype, weights, attention, eager, threads))
    engine, chosen = _clocked(engine, clock, reference_ms)
    facts = {"device": engine.device, "llm": loaded.llm, "versions": dict(engine.versions or {})}
    with spare_the_collector(), ProgressBar("measuring", "steps known well enough") as bar:
        measured = measure(
            engine.runner, chosen, designed_cases(loaded, engine), out.with_name(f"{out.name}.measurements.jsonl"), facts, seed=loaded.seed,
            block_tokens=loaded.kv_cache.block_tokens, vocab=engine.vocab, budget_s=budget_s, target=target,
            progress=bar if sys.stderr.isatty() else None,
        )  # fmt: skip
    write_run(loaded, engine, measured, out)
    print_profile(measured, target, sys.stdout)
    if measured.interrupted:
        print(f"interrupted: run the same command again to go on; {out} holds what was measured", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)


def _check_clock(name: str, reference_ms: float) -> None:
    if name not in CLOCKS:
        raise InputError("--clock", f"there is no clock '{name}'", nearest(name, CLOCKS))
    if not 0 < reference_ms < float("inf"):
        raise InputError("--reference-ms", f"{reference_ms:g} is no time above 0")


def _clocked(engine: Engine, name: str, reference_ms: float) -> tuple[Engine, Clock]:
    """The clock, and the engine with its device named by what its seconds are."""
    from engine.build import normalised
    from engine.clocks import RealClock

    return (engine, RealClock()) if name == "real" else normalised(engine, reference_ms / 1e3)
