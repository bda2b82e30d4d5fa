"""Kernels run in Triton's interpreter here; the variable must be set before a kernel's module is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]  # the helpers beside the tests, and the HTTP client of the shared ones
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread():
    """One torch thread: two are slower on a shared machine."""
    torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
    torch.set_num_threads(1)
