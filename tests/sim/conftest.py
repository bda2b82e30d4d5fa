"""Makes helper modules importable under every import mode of pytest: those here, and the HTTP client of the shared tests."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]
