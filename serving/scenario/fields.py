"""Field types that several parts of a scenario share: numbers with their range, policy specs, names of files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
PACKAGED = Path(__file__).resolve().parents[2] / "scenarios"

# Strict, because YAML's `true` must not pass for 1, nor "12" for 12. The bounds keep sums of them inside 64 bits.
Count = Annotated[int, Field(strict=True, ge=1, le=10**12)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=10**12)]
Integer = Annotated[int, Field(strict=True, ge=-(10**9), le=10**9)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e12, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, le=1e12, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Switch = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


@dataclass(frozen=True, slots=True, eq=False)
class AlsoAccepts:
    """Tell the JSON Schema about a short form that a validator expands before the field's own type is checked."""

    shape: dict

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict:
        return {"anyOf": [dict(self.shape), handler(core)]}


class PolicySpec(BaseModel):
    """A component by name, or by path/file.py:Class, with its options; ``where`` is for messages only."""

    model_config = STRICT
    name: Name
    options: dict[str, Any] = {}
    where: str = Field(default="", exclude=True)


def locate(path: str, info: ValidationInfo) -> str:
    """Return where the file ``path`` lies: beside the scenario, in the working directory, or among the packaged ones.

    A packaged file keeps its relative name, so that a run directory can be run again on another machine.
    """
    folder = (info.context or {}).get("folder") or Path()
    for base in (folder, Path(), PACKAGED):
        candidate = base / path
        try:
            found = candidate.is_file()
        except (OSError, ValueError):
            found = False
        if found:
            absolute = candidate.resolve()
            return absolute.relative_to(PACKAGED).as_posix() if absolute.is_relative_to(PACKAGED) else str(absolute)
    raise PydanticCustomError("missing_file", "no such file: {path}", {"path": path[:200]})


def data_file(path: str) -> Path:
    """Return the path to open for a name that ``locate`` returned."""
    return Path(path) if os.path.isabs(path) else PACKAGED / path


def _locate_if_file(text: str, info: ValidationInfo) -> str:
    """Catalogue names pass as they are; what looks like a path must exist."""
    if text.endswith((".yaml", ".yml")):
        return str(data_file(locate(text, info)))
    return text


DataFile = Annotated[Name, AfterValidator(locate)]
CatalogueName = Annotated[Name, AfterValidator(_locate_if_file)]


def _spec(where: str, value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, PolicySpec):
        return value
    if isinstance(value, str):
        name, options = value, {}
    elif isinstance(value, dict):
        options = {key: option for key, option in value.items() if key != "name"}
        if "name" not in value:
            raise PydanticCustomError("spec_name", "needs the key 'name'")
        name = value["name"]
        if not isinstance(name, str):
            raise PydanticCustomError("spec_name", "'name' must be a string")
    else:
        raise PydanticCustomError("spec_type", "must be a name or a mapping with the key 'name'")
    return {"name": policy_file(name, info), "options": options, "where": where_of(where, info)}


def policy_file(name: str, info: ValidationInfo) -> str:
    """Resolve the file of ``path/file.py:Class``; any other name is returned as it is."""
    file, colon, class_name = name.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{data_file(locate(file, info))}:{class_name}"
    return name


def where_of(dotted: str, info: ValidationInfo) -> str:
    """Return ``dotted`` with the file and line it was read from, when a file was read."""
    name_place = (info.context or {}).get("where")
    return name_place(dotted) if name_place else dotted


def _short(spec: PolicySpec) -> Any:
    return {"name": spec.name, **spec.options} if spec.options else spec.name


_SPEC_SHAPE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": True}


def spec_field(where: str) -> Any:
    """Return the type of a field at ``where`` that holds a name, or a mapping with the key name and options."""
    return Annotated[
        PolicySpec,
        BeforeValidator(lambda value, info: _spec(where, value, info)),
        PlainSerializer(_short),
        _OnlySchema({"anyOf": [{"type": "string"}, _SPEC_SHAPE]}),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _OnlySchema:
    shape: dict

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict:
        return dict(self.shape)
