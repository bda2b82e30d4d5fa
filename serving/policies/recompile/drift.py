"""Compile again once tensors have lived for longer or shorter than planned, for some steps on end."""

from __future__ import annotations

from serving.errors import InputError


class Drift:
    """Waits for ``steps`` successive steps of a kind whose lifetimes are more than ``above_s`` off, so that one odd step changes nothing."""

    def __init__(self, *, above_s: float = 0.008, steps: int = 4) -> None:
        if not above_s >= 0 or steps < 1:
            raise InputError("above_s", f"must not be negative, and steps at least 1, got {above_s} and {steps}")
        self.drift_above_s = above_s
        self.steps = steps

    def recompile(self, drifted_steps: int) -> bool:
        """Whether it has lasted."""
        return drifted_steps >= self.steps
