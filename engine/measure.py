"""Measuring steps of given shapes: random order, warm-up, repeats until each mean is known well enough, every result kept at once.

The results file beside the run directory only ever grows, a line per measurement: whoever is interrupted goes on from there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.clocks import Clock
from engine.loop import StepRunner
from engine.step import SequenceInput, StepInput, StepOutput
from serving.errors import InputError
from serving.memory import blocks_for
from serving.rng import stream

FEWEST = 4  # repeats before an interval means anything
MOST = 200


class Case(NamedTuple):
    """A step's shape: prefill chunks as (new tokens, context before), and decodes that each attend to ``context`` entries."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    context: int = 0

    @property
    def regime(self) -> str:
        """prefill, decode or mixed."""
        return "mixed" if self.chunks and self.decodes else "prefill" if self.chunks else "decode"

    def __str__(self) -> str:
        parts = [f"{new}@{before}" for new, before in self.chunks] + ([f"{self.decodes}x{self.context}"] if self.decodes else [])
        return " + ".join(parts)


class Measurement(NamedTuple):
    """One execution of a case. Seconds as in ``engine_steps.parquet``; ``duration_s`` is by the clock."""

    case: int
    duration_s: float
    measured_s: float
    reference_s: float
    prepare_s: float
    launch_s: float
    sample_s: float
    post_s: float
    device_s: float
    path: str
    rows: int


@dataclass(slots=True)
class Measured:
    """All measurements so far, those of earlier sittings included."""

    cases: Sequence[Case]
    results: list[Measurement] = field(default_factory=list)
    interrupted: bool = False

    def durations_s(self, case: int) -> list[float]:
        """What the case took, each time."""
        return [one.duration_s for one in self.results if one.case == case]


def relative_half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean (Student), as a fraction of it; infinite below ``FEWEST`` values."""
    if len(values) < FEWEST:
        return math.inf
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def measure(
    runner: StepRunner, clock: Clock, cases: Sequence[Case], log: Path, facts: dict[str, Any], *, seed: int, block_tokens: int, vocab: int,
    budget_s: float, target: float, progress: Callable[[int, int | None], None] | None = None,
) -> Measured:  # fmt: skip
    """Measure every case until its mean is known within ``target`` (a fraction), or the budget is used up, or Ctrl-C.

    ``log`` is read first and then appended to; ``facts`` say what is measured. Raises InputError when it holds measurements of something else.
    """
    measured = Measured(cases, _open_log(log, facts, cases))
    steps = [_step(case, block_tokens, vocab) for case in cases]
    rng, deadline_s = stream(seed, f"profile.{len(measured.results)}"), time.monotonic() + budget_s
    warm: set[int] = set()
    clock.start()
    with log.open("a", encoding="utf-8") as file:
        try:
            while time.monotonic() < deadline_s:
                wide = [at for at in range(len(cases)) if not _known(measured.durations_s(at), target)]
                if not wide:
                    break
                for at in rng.permutation(wide).tolist():
                    if at not in warm:
                        runner.collect(runner.launch(steps[at]))
                        warm.add(at)
                    result = _execute(runner, clock, at, steps[at])
                    measured.results.append(result)
                    file.write(json.dumps(result) + "\n")
                    file.flush()
                    if progress is not None:
                        progress(len(cases) - len(wide), len(cases))
                    if time.monotonic() >= deadline_s:
                        break
        except KeyboardInterrupt:
            measured.interrupted = True
    return measured


def _known(durations_s: list[float], target: float) -> bool:
    return len(durations_s) >= MOST or relative_half_width(durations_s) <= target


def _execute(runner: StepRunner, clock: Clock, case: int, step: StepInput) -> Measurement:
    begin_s = clock.begin()
    output: StepOutput = runner.collect(runner.launch(step))
    lap = clock.lap(begin_s, output)
    if output.errors:
        raise RuntimeError(f"a measured step failed: {next(iter(output.errors.values()))}")
    times = output.times
    return Measurement(
        case, *lap, times.prepare_s, times.launch_s, times.sample_s, times.post_s, times.device_s, output.path.kind, output.path.rows
    )


def blocks_of(case: Case, block_tokens: int) -> int:
    """KV blocks that the case holds."""
    return sum(blocks_for(new + before, block_tokens) for new, before in case.chunks) + case.decodes * blocks_for(case.context, block_tokens)


def _step(case: Case, block_tokens: int, vocab: int) -> StepInput:
    """The inputs of a case: sequences of their own, on blocks of their own; whatever the cache holds there is context enough."""
    rng = np.random.default_rng(0)
    sequences, block = [], 1
    for new, before in (*case.chunks, *((1, case.context - 1) for _ in range(case.decodes))):
        count = blocks_for(new + before, block_tokens)
        tokens = rng.integers(0, vocab, new).tolist()
        sequences.append(SequenceInput(len(sequences), tokens, before, list(range(block, block + count))))
        block += count
    return StepInput(sequences, tuple(range(1024)))


def _open_log(log: Path, facts: dict[str, Any], cases: Sequence[Case]) -> list[Measurement]:
    """Read the measurements in ``log``, or begin it. A last line that was cut short, when the machine died, is taken off.

    Raises InputError for one of other cases or of another device.
    """
    header = {"facts": facts, "cases": [str(case) for case in cases]}
    if not log.is_file():
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return []
    whole, _, torn = log.read_bytes().rpartition(b"\n")
    try:
        known, *rows = [json.loads(line) for line in whole.splitlines()]
        results = [Measurement(*row) for row in rows]
        other = next((key for key, value in header.items() if known.get(key) != value), None)
    except (ValueError, TypeError, AttributeError):
        raise InputError(str(log), "is no file of measurements", "remove it, or name another --out") from None
    if other:
        raise InputError(str(log), f"holds measurements of other {other}", "remove it, or name another --out")
    if torn:
        os.truncate(log, len(whole) + 1)
    return results


@contextlib.contextmanager
def spare_the_collector() -> Iterator[None]:
    """Keep the garbage collector out of measured steps: what exists is set aside, collections are rare until the end."""
    threshold = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
