"""The ``recorded`` latency model: step n takes what step n took in a run that was measured.

With it a simulation of the same scenario must reach the instants of that run exactly, or its decisions differ: the comparison without noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hwmodels.latency import AllReduce, check_options
from serving.catalog import Gpu
from serving.errors import InputError
from serving.llm import Llm
from serving.plan import BatchPlan, StepShape


class RecordedDrafts:
    """How many tokens the decodes of each speculating step got, step by step: stands in for the generator that draws them."""

    def __init__(self, accepted: Iterable[Sequence[int]]) -> None:
        """``accepted`` holds one row a step that verified drafts, in order."""
        self._rows = iter(accepted)

    def geometric(self, chance: float, count: int) -> list[int]:
        """The next step's; it was of ``count`` decodes, or the simulation has left the record. Beyond the record nothing is accepted."""
        row = list(next(self._rows, [1] * count))
        if len(row) != count:
            raise InputError("latency.run", f"a step verified the drafts of {len(row)} sequences there and of {count} here")
        return row


class Recorded:
    """Prices plans by their number. Beyond the recording (another scenario, or a question of what saturates) steps take its mean."""

    def __init__(self, durations_s: Sequence[float], accepted: Iterable[Sequence[int]] = ()) -> None:
        """``durations_s[n]`` is what step n took; at least one. ``accepted``: see ``RecordedDrafts``."""
        self.drafts = RecordedDrafts(accepted)
        self._durations_s = list(durations_s)
        self._mean_s = sum(self._durations_s) / len(self._durations_s)

    def step_s(self, shape: BatchPlan | StepShape) -> float:
        """Seconds of the step with the plan's number; of what is no plan, the mean."""
        step = getattr(shape, "step", len(self._durations_s))
        return self._durations_s[step] if step < len(self._durations_s) else self._mean_s

    def run_s(self, shape: BatchPlan, steps: int) -> list[float]:
        """Seconds of that step and those after it."""
        known = self._durations_s[shape.step : shape.step + steps]
        return known + [self._mean_s] * (steps - len(known))


def build(options: Mapping[str, Any], *, llm: Llm, gpu: Gpu, tensor_parallel: int, weight_dtype: str | None, kv_dtype: str,
          all_reduce_s: AllReduce | None, where: str) -> Recorded:  # fmt: skip
    """Factory of ``latency: {name: recorded, run: DIR}``. Raises InputError when DIR is no run of one replica with a row per step."""
    from serving.records import open_run

    check_options(options, ("run",), where)
    if "run" not in options:
        raise InputError(f"{where}.run", "names the run directory whose steps are replayed", "give run: DIR")
    run = open_run(options["run"])
    steps = run.steps
    if not len(steps) or (steps["steps"] != 1).any() or (steps["replica"] != steps["replica"].iat[0]).any():
        raise InputError(f"{where}.run", f"{options['run']} does not record every step of one replica", "an engine's run does")
    ordered = steps.sort_values("step")
    if ordered["step"].tolist() != list(range(len(ordered))):
        raise InputError(f"{where}.run", f"{options['run']} lacks steps")
    accepted = run.plans["accepted"] if run.has("plans") and "accepted" in run.plans else ()
    return Recorded(ordered["duration_s"].tolist(), [row.tolist() for row in accepted if len(row)])
