"""Keep the plan that was made at the start."""

from __future__ import annotations

import math


class Static:
    """What was compiled ahead of time stays."""

    drift_above_s = math.inf

    def recompile(self, drifted_steps: int) -> bool:
        """Never."""
        return False
