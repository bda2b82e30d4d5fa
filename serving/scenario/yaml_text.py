"""YAML text to plain values, with the line of every key. Strict where YAML is loose, and safe on hostile text.

Built on PyYAML's event stream, not on its constructor: events give line numbers, need no recursion and create no objects.
Scalars follow the YAML 1.2 core schema, so ``1e6`` is a number, ``on`` is a string and ``1:30`` is no base-60 integer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from serving.errors import InputError

MAX_CHARACTERS = 4_000_000
MAX_DEPTH = 32
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip

Path = tuple[str | int, ...]


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not been read yet."""

    value: dict | list
    path: Path
    key: str | None = None


@dataclass(slots=True)
class YamlText:
    """A parsed text: ``value`` of plain dicts, lists and scalars, and ``lines``, the 1-based line of each path."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)


def parse(text: str, name: str) -> YamlText:
    """Parse one YAML document; ``name`` stands before the line in errors.

    Raises InputError on bad syntax, duplicate keys, keys that are no strings, anchors, tags, numbers that are not
    finite, nesting deeper than 32 and text longer than 4 million characters.
    """
    if len(text) > MAX_CHARACTERS:
        raise InputError(name, f"the text is longer than {MAX_CHARACTERS:,} characters")
    result = YamlText()
    stack: list[_Open] = []
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for event in yaml.parse(text, Loader=loader):
            _take(event, stack, result, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise InputError(where, f"not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise InputError(name, f"not valid YAML: {' '.join(str(error).split())[:160]}") from None
    return result


def _take(event: yaml.Event, stack: list[_Open], result: YamlText, name: str) -> None:
    line = event.start_mark.line + 1
    where = f"{name}:{line}"
    if isinstance(event, yaml.DocumentStartEvent) and result.lines:
        raise InputError(where, "a second YAML document begins here: one file holds one")
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
        raise InputError(where, "anchors and aliases (& and *) are not supported here: write the value out")
    if isinstance(event, yaml.ScalarEvent):
        _scalar_event(event, stack, result, where, line)
    elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
        if event.tag:
            raise InputError(where, f"tag {event.tag} is not supported")
        if len(stack) >= MAX_DEPTH:
            raise InputError(where, f"nested deeper than {MAX_DEPTH} levels")
        value: dict | list = {} if isinstance(event, yaml.MappingStartEvent) else []
        stack.append(_Open(value, _attach(value, stack, result, where, line)))
    elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
        stack.pop()


def _scalar_event(event: yaml.ScalarEvent, stack: list[_Open], result: YamlText, where: str, line: int) -> None:
    if event.tag and event.tag != "!":
        raise InputError(where, f"tag {event.tag} is not supported")
    holder = stack[-1] if stack else None
    if holder is not None and isinstance(holder.value, dict) and holder.key is None:
        if event.value in holder.value:
            raise InputError(where, f"key '{event.value[:80]}' is given twice")
        if not event.style and not isinstance(scalar(event.value, where), str):
            raise InputError(where, f"key '{event.value[:80]}' must be a string")
        holder.key = event.value
        return
    value = scalar(event.value, where) if not event.style else event.value
    _attach(value, stack, result, where, line)


def _attach(value: Any, stack: list[_Open], result: YamlText, where: str, line: int) -> Path:
    """Put ``value`` where the text has it and return its path."""
    if not stack:
        result.value = value
        path: Path = ()
    elif isinstance(stack[-1].value, list):
        path = stack[-1].path + (len(stack[-1].value),)
        stack[-1].value.append(value)
    else:
        holder = stack[-1]
        if holder.key is None:
            raise InputError(where, "a key must be a plain string")
        path = holder.path + (holder.key,)
        holder.value[holder.key] = value
        holder.key = None
    result.lines[path] = line
    return path


def scalar(text: str, where: str) -> str | int | float | bool | None:
    """Return the value of a plain scalar by the YAML 1.2 core schema; refuse numbers that are not finite."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.match(text):
        return int(text)
    if _FLOAT.match(text):
        value = float(text)
        if math.isfinite(value):
            return value
        raise InputError(where, f"{text[:40]} is too large a number")
    if _NOT_FINITE.match(text):
        raise InputError(where, f"{text} is not a finite number", "leave the key out, or write null, where there is no limit")
    return text
