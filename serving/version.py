"""Which twinserve this is: its version, and the commit when it runs from a git checkout."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def version() -> str:
    """Return the version: of the checkout this code lies in, else of the installed package."""
    project = _ROOT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    from importlib import metadata  # slow to import, and needed only outside a checkout

    return metadata.version("twinserve")


def commit() -> str | None:
    """Return the commit of the checkout this code lies in, ``-dirty`` when files were changed; None outside a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
