"""Makes the drivers of the simulator's tests importable here: a scheduler is best tested by making it serve."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "sim"))
