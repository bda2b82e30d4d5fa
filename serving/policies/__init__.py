"""The decisions: one small file each, found by name or as ``module:Class`` / ``path/file.py:Class``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import keyword
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from serving.errors import InputError, nearest
from serving.policies.protocols import Admission, Batching, Limits, Ordering, Policies, Routing, Victim, Window

__all__ = [
    "Admission", "Batching", "Limits", "Ordering", "Policies", "Routing", "Victim", "Window", "kinds", "load", "names",
    "option_names",
]  # fmt: skip

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
KINDS: dict[str, tuple[str, ...]] = {  # kind -> the methods that a policy of this kind must have
    "ordering": ("key",),
    "batching": ("plan",),
    "window": ("open_s",),
    "preemption": ("choose",),
    "admission": ("admit",),
    "routing": ("route",),
    "autoscaling": ("target",),
    "reload": ("load",),
    "sharding": ("layout",),
    "speculation": ("draft_tokens",),
    "adapters": ("evict",),
    "retention": ("drop",),
    "site": ("serve_at",),
    "branch": ("cached", "observe"),
    "kv_reuse": ("owners",),
    "recompile": ("recompile",),
    "eviction": ("stored", "used", "left", "forgotten", "victim"),
}


def kinds() -> list[str]:
    """The kinds of decision."""
    return sorted(KINDS)


@functools.cache
def names(kind: str) -> tuple[str, ...]:
    """Names of the policies of ``kind`` that come with the product."""
    package = importlib.import_module(f"serving.policies.{kind}")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def load(kind: str, name: str, options: Mapping[str, Any] | None = None, *, where: str | None = None) -> Any:
    """Build the policy ``name`` of ``kind`` with ``options``, its keyword arguments.

    ``where`` is the dotted path for messages. Raises InputError for an unknown name or option, a file that cannot be imported,
    or a class that lacks the kind's methods.
    """
    where = where or f"policy.{kind}"
    factory = _find(kind, name, where)
    given = dict(options or {})
    known = _options(factory)
    for key in given:
        if key not in known:
            raise InputError(f"{where}.{key}", f"{kind} policy '{name}' has no such option", nearest(key, known))
    _check_types(factory, given, f"{kind} policy '{name}'", where)
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise InputError(f"{where}.{key}", f"{kind} policy '{name}' needs this option")
    try:
        policy = factory(**given)
    except InputError as error:
        raise InputError(f"{where}.{error.where}", error.problem, error.hint) from None
    except (Exception, SystemExit) as error:
        raise InputError(where, f"{kind} policy '{name}' does not accept its options: {error}") from error
    for method in KINDS[kind]:
        if not callable(getattr(policy, method, None)):
            raise InputError(where, f"'{name}' is no {kind} policy: it has no method '{method}'")
    if ":" in name:
        from serving.policies.answers import check_signatures, checked

        check_signatures(kind, policy, where)
        return checked(kind, policy)
    return policy


def option_names(kind: str, name: str, *, where: str | None = None) -> list[str]:
    """Names of the options that policy ``name`` of ``kind`` accepts. Raises InputError when there is no such policy."""
    return list(_options(_find(kind, name, where or f"policy.{kind}")))


def _options(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(factory).parameters.values()
    return {one.name: one for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}


def _check_types(factory: Callable[..., Any], given: Mapping[str, Any], what: str, where: str) -> None:
    """Refuse an option that is no number, text or truth value where its annotation asks for one; other annotations are the policy's business."""
    try:
        hints = typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except Exception:  # a user's annotation may name what isn't there
        return
    for key, value in given.items():
        hint = hints.get(key)
        wanted = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        if wanted <= set(_TYPE_NAMES) and type(value) not in wanted and not (float in wanted and type(value) is int):
            names = " or ".join(_TYPE_NAMES[one] for one in _TYPE_NAMES if one in wanted)
            raise InputError(f"{where}.{key}", f"{what} takes {names} here, not {value!r}")


def _find(kind: str, name: str, where: str) -> Callable[..., Any]:
    if ":" in name:
        return _from_user(name, where)
    if name not in names(kind):
        raise InputError(where, f"there is no {kind} policy '{name}'", nearest(name, names(kind)))
    module = importlib.import_module(f"serving.policies.{kind}.{name}")
    return getattr(module, _class_name(name))


def _class_name(name: str) -> str:
    camel = "".join(word.capitalize() for word in name.split("_"))
    return camel + "_" if keyword.iskeyword(camel) else camel


def _from_user(name: str, where: str) -> Callable[..., Any]:
    source, _, attribute = name.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError:
        raise InputError(where, f"there is no policy file '{source}'") from None
    except (Exception, SystemExit) as error:
        raise InputError(where, f"'{source}' cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise InputError(where, f"'{source}' has no class '{attribute}'", nearest(attribute, classes))
    return found


def _import_file(path: Path) -> Any:
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise FileNotFoundError(resolved)
    spec = importlib.util.spec_from_file_location(f"twinserve_user_policy_{resolved.stem}", resolved)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
