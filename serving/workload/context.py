"""What a workload needs to know about the rest of the scenario to become requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from serving.rng import stream
from serving.scenario.model import Slo


@dataclass(frozen=True, slots=True)
class Context:
    """``saturation_rps`` (a number, or a function called at most when needed) resolves load factors.

    ``skipped`` counts, by reason, the trace rows that were left out; it is the only thing here that changes.
    """

    seed: int
    block_tokens: int
    max_model_len: int
    prefix_caching: bool
    saturation_rps: Callable[[], float] | float | None = None
    slo: Slo | None = None
    skipped: dict[str, int] = field(default_factory=dict)

    def rng(self, name: str) -> np.random.Generator:
        """Return the random stream of a part of the workload."""
        return stream(self.seed, f"workload.{name}")

    def ttft_slo_s(self, class_name: str) -> float:
        """Return the objective for the first token of a class, in seconds; infinite without one."""
        return np.inf if self.slo is None else self.slo.targets(class_name).ttft_s
