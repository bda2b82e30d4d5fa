"""A suite: the scenarios on which two policies are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import scenario
from serving.errors import InputError
from serving.scenario.fields import PACKAGED

DEFAULT = PACKAGED / "regress"
_SEED_STRIDE = 1_000_003  # between replications: far from the small steps by which people vary a seed


@dataclass(frozen=True, slots=True)
class Member:
    """A scenario of a suite as plain values, with the folder its file names are relative to."""

    name: str
    raw: dict[str, Any]
    attainment: float

    def seed(self, replication: int) -> int:
        """The seed of a replication: the same for both sides, so that they see the same requests."""
        return (self.raw["seed"] + replication * _SEED_STRIDE) % 2**63


@dataclass(frozen=True, slots=True)
class Suite:
    """Scenarios in order of their names."""

    name: str
    members: tuple[Member, ...]


def load_suite(name: str) -> Suite:
    """Load the suite ``default`` or the scenarios of a folder. Raises InputError."""
    folder = DEFAULT if name == "default" else Path(name)
    if not folder.is_dir():
        raise InputError("SUITE", f"'{name}' is neither `default` nor a folder of scenarios")
    files = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    if not files:
        raise InputError("SUITE", f"there is no scenario (*.yaml) in '{name}'")
    return Suite(name, members(files))


def members(files: Sequence[Path | str]) -> tuple[Member, ...]:
    """Load scenarios, each name once. Raises InputError."""
    loaded = [scenario.load(file) for file in files]
    names = [each.name for each in loaded]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError("SUITE", f"two scenarios are named '{twice}'")
    return tuple(Member(each.name, each.resolved(), each.slo.attainment) for each in loaded)
