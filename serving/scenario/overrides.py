"""``--set path=value``: one value of a scenario replaced from the command line."""

from __future__ import annotations

from typing import Any

from serving.errors import InputError
from serving.scenario.problems import dotted
from serving.scenario.yaml_text import parse

# Two ways to say one thing: giving one on the command line takes back the other that the file gave.
_INSTEAD_OF = {"rate_rps": "load_factor", "load_factor": "rate_rps"}
_NAMED = ("policy", "latency")


def split(override: str) -> tuple[tuple[str | int, ...], Any]:
    """Parse ``a.b.0=value`` into its path and its value, read as YAML. Raises InputError."""
    text, equals, value = override.partition("=")
    where = f"--set {text.strip()[:120]}"
    parts = [part.strip() for part in text.strip().replace("[", ".").replace("]", "").split(".")]
    if not equals or not all(parts):
        raise InputError(f"--set {override[:120]}", "must have the form path.to.key=value")
    path = tuple(int(part) if part.isascii() and part.isdigit() and len(part) < 10 else part for part in parts)
    try:
        return path, parse(value, where).value
    except InputError as error:
        raise InputError(where, error.problem, error.hint) from None  # a line number means nothing here


def apply(raw: dict[str, Any], override: str) -> tuple[str | int, ...]:
    """Set one value in ``raw``, which is changed, and return its path. Unknown keys are left to the validation."""
    path, value = split(override)
    holder: Any = raw
    for depth, part in enumerate(path):
        where = f"--set {dotted(path[: depth + 1])}"
        last = depth == len(path) - 1
        if isinstance(holder, list):
            if not isinstance(part, int) or part >= len(holder):
                problem = f"there is a list of {len(holder)}: give a position from 0 to {len(holder) - 1}" if holder else "the list is empty"
                raise InputError(where, problem)
        elif isinstance(part, int):
            raise InputError(where, "is a position in a list, but there is a mapping")
        if last:
            holder[part] = value
            if isinstance(holder, dict):
                holder.pop(_INSTEAD_OF.get(part), None)
            break
        child = holder[part] if isinstance(holder, list) else holder.get(part)
        if isinstance(child, str) and path[0] in _NAMED:
            child = {"name": child}  # `ordering: fcfs` is short for `ordering: {name: fcfs}`
        elif child is None:
            child = {}
        elif not isinstance(child, dict | list):
            raise InputError(where, "is a single value: it has no keys to set")
        holder[part] = child
        holder = child
    return path
