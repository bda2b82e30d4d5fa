"""Kernels run in Triton's interpreter here; the variable must be set before a kernel's module is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread():
    """One torch thread: two are slower on a shared machine."""
    torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
    torch.set_num_threads(1)
