"""The order of what happens at one instant, for every clock: the fleet changes, requests arrive, work completes, decisions follow."""

from __future__ import annotations

FAULT, ARRIVAL, TRANSFER, STEP_END, PLAN = range(5)
