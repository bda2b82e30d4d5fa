"""The first of pydantic's complaints as one InputError that names the dotted path, its file and line, and the nearest key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import ValidationError

from serving.errors import InputError, nearest
from serving.scenario.model import json_schema


def dotted(path: tuple[str | int, ...]) -> str:
    """Join a path: keys by dots, list positions in brackets."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def to_input_error(error: ValidationError, raw: dict, where: Callable[[tuple], str]) -> InputError:
    """Turn ``error``, met on the mapping ``raw``, into one InputError; ``where`` names a path with its file and line."""
    problems = error.errors(include_url=False)
    # A misspelt required key is both missing and unknown; the unknown one is what the user must mend.
    problem = next((each for each in problems if each["type"] in ("extra_forbidden", "near_key")), problems[0])
    path = _path_in(raw, problem["loc"], problem["type"])
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return InputError(where(path), "unknown key", nearest(str(path[-1]), _keys_at(raw, path[:-1])))
    if kind == "near_key":
        return InputError(where(path + (context["key"],)), "unknown key", nearest(context["key"], context["known"]))
    if kind == "slo_class":
        return InputError(where(("slo", "classes", context["key"])), "no such class in workload.classes", nearest(context["key"], context["known"]))
    if kind == "at":  # found by looking at several keys together: the check says which of them is wrong
        return InputError(where(path + tuple(context["at"])), problem["msg"], nearest(context["name"], context["known"]) if "known" in context else "")
    if kind == "too_short":
        return InputError(where(path), "must not be empty")
    if kind == "missing":
        return InputError(where(path), "this key is required")
    if kind == "literal_error":
        return InputError(where(path), f"{_shown(problem['input'])} is not known", _choices(problem["input"], context["expected"]))
    if kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        return InputError(where(path + (key,)), f"{_shown(context['tag'])} is not known", _choices(context["tag"], context["expected_tags"]))
    if kind == "union_tag_not_found":
        return InputError(where(path), f"needs the key {context['discriminator']}")
    if kind.startswith("model") or kind == "dict_type":
        return InputError(where(path), f"must be a mapping, not {_shown(problem['input'])}")
    if kind in ("int_type", "float_type", "bool_type", "string_type", "tuple_type"):
        expected = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "a text", "tuple": "a list"}
        return InputError(where(path), f"must be {expected[kind.split('_')[0]]}, not {_shown(problem['input'])}")
    message = problem["msg"].replace("Input should", "must")
    given = f", not {_shown(problem['input'])}" if message.startswith("must be") else ""
    return InputError(where(path), message[0].lower() + message[1:] + given)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 60 else text[:57] + "..."


def _choices(given: Any, expected: str) -> str:
    return nearest(str(given), [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")])


def _path_in(raw: Any, loc: tuple, kind: str) -> tuple[str | int, ...]:
    """Drop from pydantic's location the names of union members, which the user never wrote."""
    path: list[str | int] = []
    value = raw
    for depth, part in enumerate(loc):
        last = depth == len(loc) - 1
        in_dict = isinstance(value, dict) and part in value
        if in_dict or (isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)):
            path.append(part)
            value = value[part]
        elif last and kind == "missing":
            path.append(part)
    return tuple(path)


def _keys_at(raw: Any, path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the JSON Schema allows in the mapping at ``path``."""
    schema = json_schema()
    nodes, value = [schema], raw
    for part in path:
        nodes = [child for node in nodes for child in _children(schema, node, value, part)]
        value = value[part]
    return sorted({key for node in nodes for option in _variants(schema, node, value) for key in option.get("properties", {})})


def _children(schema: dict, node: dict, value: Any, part: str | int) -> Iterator[dict]:
    for option in _variants(schema, node, value):
        child = option.get("items") if isinstance(part, int) else option.get("properties", {}).get(part)
        if child is None and isinstance(option.get("additionalProperties"), dict):
            child = option["additionalProperties"]
        if child is not None:
            yield child


def _variants(schema: dict, node: dict, value: Any) -> Iterator[dict]:
    """Yield the object schemas that ``node`` may stand for; a member whose fixed key differs from ``value``'s is left out."""
    if "$ref" in node:
        yield from _variants(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[1]], value)
    for group in ("anyOf", "oneOf", "allOf"):
        for member in node.get(group, ()):
            yield from _variants(schema, member, value)
    if "properties" in node or "items" in node or "additionalProperties" in node:
        fixed = {key: field["const"] for key, field in node.get("properties", {}).items() if "const" in field}
        if not isinstance(value, dict) or all(key not in value or value[key] == const for key, const in fixed.items()):
            yield node
