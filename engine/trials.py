"""A step that raised: find the requests at fault, so that the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.graphs import StepPath
from engine.step import StepInput, StepOutput, StepTimes

if TYPE_CHECKING:
    from engine.loop import StepRunner


def run_one_by_one(runner: StepRunner, batch: StepInput, error: Exception) -> StepOutput:
    """Execute each sequence of ``batch``, which raised ``error`` as a whole, alone; those that raise again are in ``errors``.

    What a step writes depends on its inputs alone, so running part of it again is harmless, as long as it raised before it sampled. Raises ``error`` when several sequences
    were tried and none could be executed: it is the device that is at fault.
    """
    tokens: dict[int, tuple[int, ...]] = {}
    errors: dict[int, str] = {}
    times: list[StepTimes] = []
    released = batch.released
    for sequence in batch.sequences:
        try:
            output = runner.collect(runner.launch(StepInput([sequence], released)))
        except Exception as alone:
            errors[sequence.request_id] = f"its step failed: {type(alone).__name__}: {alone}"
            continue
        released = ()
        tokens |= output.tokens
        errors |= output.errors
        times.append(output.times)
    if not times and len(batch.sequences) > 1:
        raise error
    total = StepTimes(*(sum(getattr(one, name) for one in times) for name in StepTimes.__dataclass_fields__))
    return StepOutput(tokens, StepPath("eager", len(batch.sequences), 0), total, errors)
