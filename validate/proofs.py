"""Proving or refuting declared constraints with an SMT solver (z3), with a counterexample that was checked independently.

A requirement is proved when its negation, together with the variables' ranges and the assumptions, has no solution.
"""

from __future__ import annotations

import ast
import datetime as dt
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from serving.errors import InputError
from validate.arithmetic import Formula, evaluate, names
from validate.constraints import Constraints, Variable, confidence

TIMEOUT_MS = 4000  # of the solver, per question
_CASES = 1024  # combinations of finite variables tried one by one when the whole question is too hard


class Finding(NamedTuple):
    """What is known of one requirement. ``status``: proved, refuted, stale (proved by measurements too old to trust) or unknown.

    ``counterexample`` gives every variable the requirement depends on; ``undefined`` says that it divides by zero there.
    """

    requirement: str
    status: Literal["proved", "refuted", "stale", "unknown"]
    confidence: float
    counterexample: Mapping[str, Fraction] | None = None
    undefined: bool = False


@dataclass(slots=True)
class _Prover:
    """The variables as z3 terms, their domains and the assumptions, ready to be asked about one requirement after another."""

    constraints: Constraints
    timeout_ms: int
    terms: dict[str, Any] = field(default_factory=dict)
    base: list = field(default_factory=list)

    def __post_init__(self) -> None:
        import z3

        for name, variable in self.constraints.variables.items():
            if variable.formula is not None:
                formula = Formula(self.terms)
                self.terms[name] = formula.of(variable.formula)
                self.base += formula.defined  # outside them the deployment itself has no meaning
                continue
            if variable.low is not None and variable.low == variable.high:
                self.terms[name] = z3.IntVal(int(variable.low)) if variable.whole else z3.RealVal(str(variable.low))
                continue
            term = self.terms[name] = z3.Int(name) if variable.whole else z3.Real(name)
            self.base += [term >= z3.RealVal(str(variable.low))] if variable.low is not None else []
            self.base += [term <= z3.RealVal(str(variable.high))] if variable.high is not None else []
            self.base += [z3.Or([term == z3.RealVal(str(value)) for value in variable.values])] if variable.values else []
        for tree in self.constraints.assume.values():
            formula = Formula(self.terms)
            self.base += [formula.of(tree), *formula.defined]

    def ask(self, *extra: Any) -> tuple[str, Any]:
        """Return ("sat", model), ("unsat", None) or ("unknown", None) for the domains, the assumptions and ``extra``."""
        import z3

        solver = z3.Solver()
        solver.set("timeout", self.timeout_ms)
        solver.set("random_seed", 0)
        solver.add(*self.base, *extra)
        answer = str(solver.check())
        return answer, solver.model() if answer == "sat" else None

    def cases(self) -> list[list]:
        """Equations that fix the finite variables, one list per combination; empty when there are none or too many."""
        finite = [(self.terms[v.name], _values(v)) for v in self.constraints.variables.values() if _values(v)]
        count = 1
        for _, values in finite:
            count *= len(values)
        if not finite or count > _CASES:
            return []
        return [[term == value for (term, _), value in zip(finite, chosen)] for chosen in itertools.product(*(values for _, values in finite))]


def _values(variable: Variable) -> list[int]:
    """Every value of a whole variable with a small domain; empty for others and for those of one value."""
    if not variable.whole or variable.formula is not None:
        return []
    if variable.values:
        return [int(value) for value in variable.values] if len(variable.values) > 1 else []
    if variable.low is None or variable.high is None or not 0 < variable.high - variable.low <= 64:
        return []
    return list(range(-int(-variable.low // 1), int(variable.high // 1) + 1))


def prove(constraints: Constraints, on: dt.date, timeout_ms: int = TIMEOUT_MS) -> list[Finding]:
    """Prove or refute every requirement, in order. Each counterexample is checked in exact arithmetic before it is returned.

    Raises InputError when z3 is not installed, or when nothing at all satisfies the variables' ranges and the assumptions: then every
    requirement would hold, and mean nothing.
    """
    try:
        prover = _Prover(constraints, timeout_ms)
    except ImportError as error:
        raise InputError("z3", "is not installed, and proofs need it", 'pip install "twinserve[study]"') from error
    if prover.ask()[0] == "unsat":
        raise InputError("assume", "contradicts itself or the ranges of the variables: no deployment satisfies it")
    return [_finding(prover, name, tree, on) for name, tree in constraints.require.items()]


def _finding(prover: _Prover, name: str, tree: ast.expr, on: dt.date) -> Finding:
    import z3

    constraints = prover.constraints
    used = _depends(tree, constraints.variables)
    trust = min((confidence(constraints.variables[v].measured, on, constraints.half_life_days) for v in used), default=1.0)
    formula = Formula(prover.terms)
    broken = z3.Not(z3.And(formula.of(tree), *formula.defined))
    answer, model = prover.ask(broken)
    if answer == "unknown":
        answers = [prover.ask(broken, *case) for case in prover.cases()]
        model = next((found for _, found in answers if found is not None), None)
        answer = "sat" if model is not None else "unsat" if answers and all(a == "unsat" for a, _ in answers) else "unknown"
    if answer == "unsat":
        return Finding(name, "proved" if trust >= constraints.minimum_confidence else "stale", trust)
    if answer == "unknown":
        return Finding(name, "unknown", trust)
    values, exact = _valuation(prover, model)
    undefined = exact and _checked(constraints, tree, values, name)
    return Finding(name, "refuted", trust, {v: values[v] for v in constraints.variables if v in used}, undefined)


def _depends(tree: ast.expr, variables: Mapping[str, Variable]) -> set[str]:
    used = set(names(tree))
    for name in list(used):
        formula = variables[name].formula
        used |= _depends(formula, variables) if formula is not None else set()
    return used


def _valuation(prover: _Prover, model: Any) -> tuple[dict[str, Fraction], bool]:
    """Values of all variables in a model, and whether they are exact (an irrational one is given to 20 digits)."""
    import z3

    values, exact = {}, True
    for name, term in prover.terms.items():
        found = model.eval(term, model_completion=True)
        if z3.is_algebraic_value(found):
            found, exact = found.approx(20), False
        values[name] = Fraction(found.as_long()) if z3.is_int_value(found) else Fraction(found.numerator_as_long(), found.denominator_as_long())
    return values, exact


def _checked(constraints: Constraints, tree: ast.expr, values: Mapping[str, Fraction], name: str) -> bool:
    """Check a counterexample by independent arithmetic; return whether the requirement divides by zero there."""
    held = all(evaluate(assumed, values) for assumed in constraints.assume.values())
    held &= all(values[v.name] == evaluate(v.formula, values) for v in constraints.variables.values() if v.formula is not None)
    try:
        broken, undefined = not evaluate(tree, values), False
    except ZeroDivisionError:
        broken, undefined = True, True
    if not held or not broken:
        raise RuntimeError(f"the solver's counterexample to '{name}' does not stand: {dict(values)}")
    return undefined
