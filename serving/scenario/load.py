"""Load a scenario from a file, a packaged name or a mapping."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serving.errors import InputError, nearest
from serving.files import read_text
from serving.scenario.fields import PACKAGED
from serving.scenario.model import Scenario
from serving.scenario.overrides import apply
from serving.scenario.problems import dotted, to_input_error
from serving.scenario.yaml_text import parse


def names() -> list[str]:
    """Return the names of the packaged scenarios, sorted."""
    return sorted(path.stem for path in PACKAGED.glob("*.yaml"))


def load(path_or_name: str | Path, overrides: Sequence[str] = (), seed: int | None = None, trace: Path | None = None) -> Scenario:
    """Read a scenario: a path to a YAML file, or the name of a packaged one.

    ``trace`` is a file to replay, with the options that the scenario gives for its own; then ``overrides``, texts
    ``path.to.key=value``, are applied in order; ``seed`` replaces the file's. Raises InputError, which names the dotted
    path with its file and line.
    """
    path = _find(str(path_or_name))
    shown = _shown(path)
    document = parse(read_text(path), shown)
    if not isinstance(document.value, dict):
        raise InputError(shown, "a scenario must be a mapping of keys", "see `twinserve schema`")
    if trace is not None:
        _set_trace(document.value, trace)
    return from_mapping(document.value, overrides, seed=seed, shown=shown, lines=document.lines, folder=path.parent, name=path.stem)


def from_mapping(
    raw: dict[str, Any],
    overrides: Sequence[str] = (),
    *,
    seed: int | None = None,
    shown: str = "",
    lines: dict[tuple, int] | None = None,
    folder: Path | None = None,
    name: str | None = None,
) -> Scenario:
    """Validate a mapping of plain values, such as ``Scenario.resolved()`` returns. Raises InputError.

    ``shown`` and ``lines`` say where the values came from, ``folder`` is where relative file names begin.
    """
    raw = copy.deepcopy(raw)
    set_paths = [apply(raw, override) for override in overrides]
    if seed is not None:
        raw["seed"] = seed
    if name is not None:
        raw.setdefault("name", name)

    def where(path: tuple) -> str:
        known = lines is not None and path in lines
        if any(path[: len(each)] == each or (each[: len(path)] == path and not known) for each in set_paths):
            return f"--set {dotted(path)}"
        line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1) if lines else 0
        place = f"{shown}:{line}: " if line else (f"{shown}: " if shown else "")
        return place + (dotted(path) or "scenario")

    context = {"folder": folder, "where": lambda text: where(tuple(text.split(".")))}
    try:
        return Scenario.model_validate(raw, context=context)
    except ValidationError as error:
        raise to_input_error(error, raw, where) from None


def _set_trace(raw: dict[str, Any], file: Path) -> None:
    if not file.is_file():
        raise InputError(str(file), "is a folder, not a trace" if file.is_dir() else "no such file")
    workload = raw.get("workload")
    if isinstance(workload, dict):
        own = workload.get("trace")
        options = {key: value for key, value in own.items() if key != "format"} if isinstance(own, dict) else {}
        workload["trace"] = {**options, "file": str(file.resolve())}


def _find(text: str) -> Path:
    if "\0" in text or len(text) > 4000:
        raise InputError("scenario", "is no file name")
    path = Path(text)
    if path.is_file():
        return path
    packaged = PACKAGED / f"{text.removesuffix('.yaml')}.yaml"
    if os.sep not in text and packaged.is_file():
        return packaged
    raise InputError(text, "no such scenario file, and no packaged scenario of that name", nearest(path.stem, names()))


def _shown(path: Path) -> str:
    try:
        relative = os.path.relpath(path)
    except ValueError:
        return str(path)
    return relative if not relative.startswith("..") else str(path)
