"""What a sweep varies: ``path=v1,v2``, ``path=start:stop:steps``, ``path=log:start:stop:steps``; grids, random draws, lists."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import InputError
from serving.files import read_text
from serving.rng import stream
from serving.scenario.overrides import split
from serving.scenario.yaml_text import parse

MAX_POINTS = 1_000_000
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER}):({_NUMBER})(?::(\d+))?\Z")
_MARGIN = 1e-9  # a step this close to a whole number is one

Setting = dict[str, Any]  # dotted path -> value


@dataclass(frozen=True, slots=True)
class Dimension:
    """One varied path: its values or, for ``--random`` only, the range to draw from."""

    path: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def drawn(self, level: float, whole: bool) -> Any:
        """The value at ``level`` in [0, 1): an element of ``values``, or so far into the range; rounded where it must be ``whole``."""
        if self.values:
            return self.values[int(level * len(self.values))]
        if self.log:
            value = self.low * (self.high / self.low) ** level
        else:
            value = self.low + (self.high - self.low) * level
        return round(value) if whole else value


def dimension(text: str, current: Any) -> Dimension:
    """Parse one ``--vary``; ``current`` is the scenario's value: where it is a whole number, the steps of a range are rounded."""
    path, equals, given = text.partition("=")
    where = f"--vary {path.strip()[:120]}"
    if not equals or not path.strip() or not given.strip():
        raise InputError(f"--vary {text[:120]}", "must have the form path=v1,v2,... or path=start:stop:steps")
    match = _RANGE.match(given.strip())
    if match is None:
        values = [_value(path.strip(), item, where) for item in split_list(given)]
        return Dimension(path.strip(), tuple(_unique(values)))
    log, low, high, steps = bool(match[1]), float(match[2]), float(match[3]), match[4]
    if not math.isfinite(high - low):
        raise InputError(where, "the ends of the range are too large")
    if log and not (low > 0 and high > 0):
        raise InputError(where, "a log range needs two positive ends")
    if steps is None:
        if not low < high:
            raise InputError(where, "the range must rise")
        return Dimension(path.strip(), (), low, high, log)
    if not 1 <= int(steps) <= MAX_POINTS:
        raise InputError(where, f"needs between 1 and {MAX_POINTS:,} steps")
    return Dimension(path.strip(), tuple(_unique(_steps(low, high, int(steps), log, _is_whole(current)))))


def _is_whole(current: Any) -> bool:
    return isinstance(current, int) and not isinstance(current, bool)


def _steps(low: float, high: float, steps: int, log: bool, whole: bool) -> list[int | float]:
    levels = [i / (steps - 1) for i in range(steps)] if steps > 1 else [0.0]
    values = [math.exp(math.log(low) + (math.log(high) - math.log(low)) * level) if log else low + (high - low) * level for level in levels]
    values[0], values[-1] = low, (high if steps > 1 else low)
    return [round(value) if whole or abs(value - round(value)) <= _MARGIN * abs(value) else float(f"{value:.12g}") for value in values]


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    items, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0 and not quote:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items]


def _value(path: str, item: str, where: str) -> Any:
    if not item:
        raise InputError(where, "has an empty value", "null stands for none")
    try:
        return split(f"{path}={item}")[1]
    except InputError as error:
        raise InputError(where, error.problem, error.hint) from None


def _unique(values: Iterable[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def grid(dimensions: Sequence[Dimension]) -> list[Setting]:
    """Every combination, the last dimension fastest. Raises InputError for a range without steps, or too many points."""
    for each in dimensions:
        if not each.values:
            raise InputError(f"--vary {each.path}", "the range needs a number of steps", "start:stop:steps, or draw from it with --random N")
    if math.prod(len(each.values) for each in dimensions) > MAX_POINTS:
        raise InputError("--vary", f"makes more than {MAX_POINTS:,} points", "draw some of them with --random N")
    return [dict(zip([each.path for each in dimensions], values)) for values in itertools.product(*(each.values for each in dimensions))]


def random_points(dimensions: Sequence[Dimension], count: int, *, seed: int, whole: dict[str, bool]) -> list[Setting]:
    """Draw ``count`` points, stratified (a Latin hypercube): every part of every range is visited."""
    if not 1 <= count <= MAX_POINTS:
        raise InputError("--random", f"must lie between 1 and {MAX_POINTS:,}", f"got {count}")
    rng = stream(seed, "sweep.random")
    levels = {each.path: (rng.permutation(count) + rng.random(count)) / count for each in dimensions}
    return [{each.path: each.drawn(float(levels[each.path][i]), whole[each.path]) for each in dimensions} for i in range(count)]


def listed_points(path: Path) -> list[Setting]:
    """Read points: a CSV whose header names dotted paths, or YAML, a list of mappings from dotted path to value."""
    text = read_text(path)
    if path.suffix == ".csv":
        try:
            rows = list(csv.reader(text.splitlines(), strict=True))
        except csv.Error as error:
            raise InputError(str(path), f"is not CSV: {error}") from None
        if len(rows) < 2:
            raise InputError(str(path), "holds no points", "the first line names dotted paths, every further one is a point")
        header = [name.strip() for name in rows[0]]
        for number, row in enumerate(rows[1:], 2):
            if len(row) != len(header):
                raise InputError(f"{path}:{number}", f"has {len(row)} values for {len(header)} paths")
        return [{name: _value(name, item, f"{path}:{number}") for name, item in zip(header, row)} for number, row in enumerate(rows[1:], 2)]
    points = parse(text, str(path)).value
    if not isinstance(points, list) or not points or not all(isinstance(point, dict) for point in points):
        raise InputError(str(path), "must be a list of mappings from dotted path to value")
    return points


def override(path: str, value: Any) -> str:
    """The ``path=value`` text that sets ``value``: JSON is YAML."""
    return f"{path}={json.dumps(value)}"
