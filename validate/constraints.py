"""Constraints on a deployment, declared in YAML and read again whenever the file changes; `validate.proofs` proves or refutes them.

    version: 1
    name: an 8B chat replica
    variables:
      tp: {from: cluster.tensor_parallel}                       # a fact of the scenario, the language model, the GPU or its memory
      fraction: {min: 0.85, max: 0.95}                          # any value in a range
      batch: {type: int, values: [64, 128, 256]}                # one of several
      activation_gib: {value: 4.76, margin: 0.05, measured: 2026-08-01}     # a measurement, which ages
      kv_gib: {formula: gpu_gib * fraction - weights_gib - activation_gib}  # defined by others
    assume: [batch * tp <= 512]
    require: {the cache holds a full batch: batch * 2048 * kv_bytes_per_token <= kv_gib * 2 ** 30}
    calibration: {half_life_days: 90, minimum_confidence: 0.5}

A requirement is proved when no values of the variables satisfy the assumptions and break it. Confidence halves with each half-life
of the oldest measurement used, and each measurement's margin grows in the same measure (margin / confidence): an old calibration
first loosens a proof, then loses it. Half-life and minimum are the deployment's own declarations, not derived figures.
"""

from __future__ import annotations

import ast
import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from serving.errors import InputError, nearest
from serving.files import read_yaml
from validate.arithmetic import names, parse


@dataclass(frozen=True, slots=True)
class Variable:
    """What a variable may be: ``low`` to ``high`` (None: unbounded), or one of ``values``; or ``formula``, defined by others.

    ``measured`` is the day of the measurement that gave it.
    """

    name: str
    whole: bool = False
    low: Fraction | None = None
    high: Fraction | None = None
    values: tuple[Fraction, ...] = ()
    formula: ast.expr | None = None
    measured: dt.date | None = None


@dataclass(frozen=True, slots=True)
class Constraints:
    """A parsed set: variables in order of definition, assumptions and requirements by their text or name."""

    name: str
    variables: Mapping[str, Variable]
    assume: Mapping[str, ast.expr]
    require: Mapping[str, ast.expr]
    half_life_days: float = 90.0
    minimum_confidence: float = 0.0


_TOP = ("version", "name", "variables", "assume", "require", "calibration")
_VARIABLE = ("type", "from", "value", "values", "min", "max", "formula", "margin", "measured")


def confidence(measured: dt.date | None, on: dt.date, half_life_days: float) -> float:
    """Confidence in a measurement of that day: one when fresh, half after a half-life; facts that were not measured do not age."""
    if measured is None:
        return 1.0
    return 2.0 ** (-max(0, (on - measured).days) / half_life_days)


def load(path: Path, facts: Mapping[str, Any], on: dt.date) -> Constraints:
    """Read a file of constraints; ``facts`` answers ``from:`` paths. Raises InputError naming the path of what is wrong."""
    return from_mapping(read_yaml(path), facts, on)


def from_mapping(declared: Any, facts: Mapping[str, Any], on: dt.date) -> Constraints:
    """Check and resolve declared constraints. Raises InputError."""
    declared = _mapping(declared, "constraints", _TOP)
    if declared.get("version") != 1:
        raise InputError("version", f"is {declared.get('version')!r}", "this release reads version 1")
    calibration = _mapping(declared.get("calibration") or {}, "calibration", ("half_life_days", "minimum_confidence"))
    half_life = float(_number(calibration.get("half_life_days", 90), "calibration.half_life_days"))
    if half_life <= 0:
        raise InputError("calibration.half_life_days", "must be above zero")
    variables: dict[str, Variable] = {}
    for name, spec in _mapping(declared.get("variables") or {}, "variables", None).items():
        if not str(name).isidentifier():
            raise InputError(f"variables.{name}", "is no name: use letters, digits and underscores")
        variable = _variable(str(name), spec, facts, on, half_life)
        if variable.formula is not None:
            _known(variable.formula, variables, f"variables.{name}.formula")
        variables[str(name)] = variable
    assume = {str(text): parse(text, f"assume[{i}]") for i, text in enumerate(declared.get("assume") or [])}
    require = {str(name): parse(text, f"require.{name}") for name, text in _mapping(declared.get("require") or {}, "require", None).items()}
    if not require:
        raise InputError("require", "names nothing to prove")
    for part, trees in (("assume", assume), ("require", require)):
        for name, tree in trees.items():
            _known(tree, variables, f"{part}.{name}")
            if not isinstance(tree, ast.Compare | ast.BoolOp | ast.Call | ast.UnaryOp):
                raise InputError(f"{part}.{name}", "states nothing: a comparison is needed")
    minimum = float(_number(calibration.get("minimum_confidence", 0), "calibration.minimum_confidence"))
    return Constraints(str(declared.get("name", "")), variables, assume, require, half_life, minimum)


def _mapping(value: Any, where: str, keys: Sequence[str] | None) -> Mapping:
    if not isinstance(value, Mapping):
        raise InputError(where, "must be a mapping of keys to values")
    for key in value:
        if keys is not None and key not in keys:
            raise InputError(f"{where}.{key}", "is no key of it", nearest(str(key), keys))
    return value


def _number(value: Any, where: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (float("inf"), float("-inf")):
        raise InputError(where, f"{value!r} is no number")
    return Fraction(repr(value))


def _known(tree: ast.expr, variables: Mapping[str, Variable], where: str) -> None:
    for name in names(tree):
        if name not in variables:
            raise InputError(where, f"'{name}' is not defined before it is used", nearest(name, variables))


def _variable(name: str, spec: Any, facts: Mapping[str, Any], on: dt.date, half_life_days: float) -> Variable:
    where = f"variables.{name}"
    if not isinstance(spec, Mapping):
        spec = {"value": spec}
    spec = _mapping(spec, where, _VARIABLE)
    sources = [key for key in ("from", "value", "values", "formula") if key in spec]
    if len(sources) + ("min" in spec or "max" in spec) != 1:
        raise InputError(where, "needs exactly one of from, value, values, formula, or min and max")
    if spec.get("type", "real") not in ("int", "real"):
        raise InputError(f"{where}.type", f"'{spec['type']}' is no type", "int or real")
    whole = spec.get("type") == "int"
    if "formula" in spec:
        return Variable(name, whole, formula=parse(spec["formula"], f"{where}.formula"))
    measured = spec.get("measured")
    if measured is not None and not isinstance(measured, dt.date):
        raise InputError(f"{where}.measured", f"'{measured}' is no date", "as in 2026-08-01")
    if "values" in spec:
        found = tuple(_number(value, f"{where}.values") for value in spec["values"] or ())
        if not found:
            raise InputError(f"{where}.values", "is empty: the variable could have no value")
        return Variable(name, whole or all(value.denominator == 1 for value in found), values=found, measured=measured)
    if not sources:
        low, high = (_number(spec[key], f"{where}.{key}") if key in spec else None for key in ("min", "max"))
        if low is not None and high is not None and low > high:
            raise InputError(where, f"has no value: its minimum {float(low):g} is above its maximum {float(high):g}")
        return Variable(name, whole, low, high, measured=measured)
    value = _number(_fact(facts, spec["from"], f"{where}.from") if "from" in spec else spec["value"], where)
    margin = _number(spec.get("margin", 0), f"{where}.margin") / Fraction(repr(confidence(measured, on, half_life_days)))
    reach = abs(value) * margin
    return Variable(name, (whole or value.denominator == 1) and not margin, value - reach, value + reach, measured=measured)


def _fact(facts: Mapping[str, Any], dotted: Any, where: str) -> Any:
    value: Any = facts
    for key in str(dotted).split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise InputError(where, f"'{dotted}' is no fact of this deployment", nearest(key, value) if isinstance(value, Mapping) and value else "give a scenario")
        value = value[key]
    return value


class Watched:
    """A file of constraints that is read again when it changed; a broken edit keeps the last good set and says what is wrong."""

    def __init__(self, path: Path, facts: Mapping[str, Any], on: dt.date) -> None:
        self._path, self._facts, self._on = path, facts, on
        self._stamp = self._now()
        self._current = load(path, facts, on)
        self.error: InputError | None = None

    def _now(self) -> tuple[int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size

    def current(self) -> Constraints:
        """Return the newest set that could be read; ``error`` tells why the file's newest text could not."""
        stamp = self._now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current, self.error = load(self._path, self._facts, self._on), None
            except InputError as error:
                self.error = error
        return self._current


def facts_of(scenario: Any) -> dict[str, Any]:
    """Facts that ``from:`` may name: the resolved scenario's keys, and ``llm.*``, ``gpu.*`` (with memory_gib) and ``memory.*``.

    ``memory`` is what one GPU holds, as `twinserve memory` prints it, whether it fits or not.
    """
    from serving.catalog import load_gpu, load_llm
    from serving.layer_reuse import reusing
    from serving.memory import kv_capacity

    cluster, cache, batching = scenario.cluster, scenario.kv_cache, scenario.policy.batching
    llm, gpu = reusing(load_llm(scenario.llm), cache.layer_reuse), load_gpu(cluster.gpu, "cluster.gpu")
    capacity = kv_capacity(
        llm, gpu, tensor_parallel=cluster.tensor_parallel, memory_fraction=cache.memory_fraction, block_tokens=cache.block_tokens,
        max_model_len=scenario.max_model_len, max_batch_tokens=batching.max_batch_tokens, max_batch_seqs=batching.max_batch_seqs, blocks=cache.blocks,
    )  # fmt: skip
    return {**scenario.resolved(), "llm": asdict(llm), "gpu": {**asdict(gpu), "memory_gib": gpu.total_memory_bytes / 2**30}, "memory": asdict(capacity)}
