"""``python -m validate.regress.elsewhere``: a run in a process of its own, for the property that policies are deterministic."""

from __future__ import annotations

import sys

from validate.regress.properties import run_elsewhere

if __name__ == "__main__":
    print(run_elsewhere(sys.stdin.read()))
