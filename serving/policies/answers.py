"""What a user's own policy answers is checked before it is believed; policies that come with the product are not slowed down.

An answer that is no answer (a key that does not end in the request's id, a window that opens at NaN, a victim that does not run) would
otherwise be noticed far from its cause, or never.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from serving.errors import IllegalAnswerError, InputError
from serving.policies import protocols
from serving.sequence import DECODING, PREFILLING, Sequence

Rule = Callable[..., str]  # of the answer and the method's arguments: what is wrong with it, or nothing


def check_signatures(kind: str, policy: Any, where: str) -> None:
    """Raise InputError, with the arguments that a method of ``kind`` is given, where ``policy`` does not take them."""
    protocol = _PROTOCOLS[kind]
    for name, method in vars(protocol).items():
        if not inspect.isfunction(method) or name.startswith("_") or not hasattr(policy, name):
            continue
        given = list(inspect.signature(method).parameters)[1:]
        try:
            inspect.signature(getattr(policy, name)).bind(*given)
        except TypeError:
            raise InputError(where, f"{type(policy).__name__}.{name} must take ({', '.join(['self', *given])})") from None


def checked(kind: str, policy: Any) -> Any:
    """Return ``policy`` with the methods that ``kind`` has rules for answering by them, or raising IllegalAnswerError.

    A policy whose class has slots only is returned as it is: there is nowhere to put the check.
    """
    rules = _RULES.get(kind, dict)()
    for method, rule in rules.items():
        answer = getattr(policy, method, None)
        if callable(answer) and hasattr(policy, "__dict__"):
            policy.__dict__[method] = _held_to(rule, answer, f"{kind} policy {type(policy).__name__}: {method}()")
    return policy


def _held_to(rule: Rule, answer: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(answer)
    def ask(*arguments: Any) -> Any:
        given = answer(*arguments)
        wrong = rule(given, *arguments)
        if wrong:
            raise IllegalAnswerError(f"{what} answered {_short(given)}; {wrong}")
        return given

    return ask


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:57] + "..."


def _ordering() -> dict[str, Rule]:
    kinds: list[tuple[bool, ...]] = []  # of the first key: which of its places hold text

    def key(given: Any, request: Any, queue: Any) -> str:
        if not isinstance(given, tuple) or not given or given[-1] != request.request_id:
            return f"it must be a tuple that ends in the request's id, here {request.request_id}"
        if not all(isinstance(part, str) or _is_number(part) for part in given):
            return "its parts must be numbers (no NaN) or texts"
        texts = tuple(isinstance(part, str) for part in given)
        if not kinds:
            kinds.append(texts)
        return "" if texts == kinds[0] else "keys must be comparable: as many parts, and numbers or texts in the same places"

    return {"key": key, "evicts_from_s": _time}


def _window() -> dict[str, Rule]:
    return {"open_s": _time}


def _time(given: Any, *arguments: Any) -> str:
    return "" if _is_number(given) else "it must be a time in seconds (no NaN)"


def _preemption() -> dict[str, Rule]:
    def choose(given: Any, running: Any, beneficiary: Any) -> str:
        if given is None:
            return "" if beneficiary is not None else "blocks are short, so it must name a running sequence"
        runs = isinstance(given, Sequence) and given.state in (PREFILLING, DECODING)
        return "" if runs else "it must be a running sequence" + ("" if beneficiary is None else " or None")

    return {"choose": choose}


def _admission() -> dict[str, Rule]:
    def admit(given: Any, *arguments: Any) -> str:
        return "" if given is None or isinstance(given, str) else "it must be None, to accept, or the name of the limit that refuses"

    def retry_after_s(given: Any, *arguments: Any) -> str:
        return "" if given is None or (_is_number(given) and given >= 0) else "it must be seconds, not below 0, or None"

    return {"admit": admit, "retry_after_s": retry_after_s}


def _position(given: Any, *arguments: Any) -> str:
    return "" if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else "it must be a whole number, not below 0"


def _routing() -> dict[str, Rule]:
    return {"route": _position}


def _site() -> dict[str, Rule]:
    return {"serve_at": _position}


def _speculation() -> dict[str, Rule]:
    return {"draft_tokens": _position}


def _is_number(part: Any) -> bool:
    """Whether it is an int or a float (NumPy's too) that compares with itself."""
    try:
        return not isinstance(part, (str, bytes)) and not math.isnan(part)
    except (TypeError, ValueError, OverflowError):
        return isinstance(part, int)


_PROTOCOLS = {
    "ordering": protocols.Ordering, "batching": protocols.Batching, "window": protocols.Window, "preemption": protocols.Victim,
    "admission": protocols.Admission, "routing": protocols.Routing, "autoscaling": protocols.Autoscaling, "reload": protocols.Reload,
    "sharding": protocols.Sharding, "speculation": protocols.Speculation, "adapters": protocols.Adapters,
    "retention": protocols.Retention, "site": protocols.Site, "branch": protocols.Branch, "kv_reuse": protocols.KvReuse,
    "recompile": protocols.Recompile, "eviction": protocols.Eviction,
}  # fmt: skip
_RULES: dict[str, Callable[[], dict[str, Rule]]] = {
    "ordering": _ordering, "window": _window, "preemption": _preemption, "admission": _admission, "routing": _routing, "site": _site,
    "speculation": _speculation,
}  # fmt: skip
