"""The errors that a user's mistake raises: the command prints them on one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A mistake in what the user gave: a scenario, a trace, a catalogue entry, a policy file, a flag.

    ``where`` is a dotted path (``policy.ordering.name``) or ``file:line``; ``problem`` is one sentence;
    ``hint`` is the nearest valid choice or the binding limit, if there is one.
    """

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        self.where = where
        self.problem = problem
        self.hint = hint
        super().__init__(f"{where}: {problem}" + (f" ({hint})" if hint else ""))


class BrokenPolicyError(RuntimeError):
    """A policy broke a rule of the seam: names the policy, the step and the rule."""


class IllegalAnswerError(BrokenPolicyError):
    """What a policy answered is no answer: names the policy, the method, the answer and what it must be."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint that names the choice closest to ``word``, or all choices when none is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return "choose from: " + ", ".join(known) if known else "there is nothing to choose from"
