"""Cut the context of sequences whose attention has settled on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from serving.errors import InputError


class Entropy:
    """A sequence whose mean attention entropy stays below ``threshold`` (of its maximum, 0 to 1) for ``steps`` decode steps in a row
    keeps ``sink_blocks`` and its latest ``window_blocks``; the rest of its pages is given back.
    """

    most_blocks: int | None = None

    def __init__(self, *, threshold: float = 0.15, steps: int = 3, window_blocks: int = 64, sink_blocks: int = 1) -> None:
        if not 0 < threshold <= 1:
            raise InputError("threshold", f"must lie in (0, 1], got {threshold}")
        if steps < 1 or window_blocks < 1 or sink_blocks < 0:
            raise InputError("steps", f"needs steps and window_blocks of at least 1, got {steps} and {window_blocks}")
        self.entropy_below = threshold
        self.steps, self.window_blocks, self.sink_blocks = steps, window_blocks, sink_blocks

    def drop(self, held: int, calm_steps: int, heat: Sequence[float] | None) -> Sequence[int]:
        """All between the sinks and the window, once the sequence has been calm for long enough."""
        if calm_steps < self.steps:
            return ()
        return range(self.sink_blocks, max(self.sink_blocks, held - self.window_blocks))
