"""Fixtures that every room shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public traces, profiles and measured runs, named by the environment variable TWINSERVE_DATA."""
    folder = os.environ.get("TWINSERVE_DATA")
    if folder and Path(folder).is_dir():
        return Path(folder)
    if os.environ.get("TWINSERVE_REQUIRE_DATA") == "1":
        pytest.fail("TWINSERVE_REQUIRE_DATA=1 but TWINSERVE_DATA names no folder")
    pytest.skip("TWINSERVE_DATA names no folder: the public data set is not here")
