"""Arithmetic that is written once and read twice: as formulas for an SMT solver, and exactly, in fractions, to check its answers.

The language is a small part of Python's expressions: numbers, names, + - * / // % ** (a whole exponent), comparisons, and/or/not,
``a if c else b``, and min, max, abs, floor, ceil, divides(d, n), implies(a, b). Decimal literals are exact: 0.1 is a tenth.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from serving.errors import InputError, nearest

FUNCTIONS = {"min": None, "max": None, "abs": 1, "floor": 1, "ceil": 1, "divides": 2, "implies": 2}  # name -> arguments
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_COMPARE: dict[type, Callable] = {
    ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b,
}  # fmt: skip
_MAX_EXPONENT = 64


def parse(text: str, where: str) -> ast.expr:
    """Parse an expression; raises InputError at ``where`` for anything outside the language."""
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(where, f"'{text}' is no expression: {error}") from error
    for node in ast.walk(tree):
        _check(node, where)
    return tree


def _check(node: ast.AST, where: str) -> None:
    if isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
        raise InputError(where, f"{node.value!r} is no number")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        exponent = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(exponent, int) or not 0 <= exponent <= _MAX_EXPONENT:
            raise InputError(where, f"an exponent must be a whole number from 0 to {_MAX_EXPONENT}")
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else "this"
        if name not in FUNCTIONS or node.keywords:
            raise InputError(where, f"'{name}' is no function here", nearest(name, FUNCTIONS))
        wanted = FUNCTIONS[name]
        if len(node.args) != wanted and (wanted is not None or not node.args):
            raise InputError(where, f"{name} takes {wanted or 'at least one'} argument{'' if wanted == 1 else 's'}")
    allowed = (ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.Compare, ast.BoolOp, ast.And, ast.Or,
               ast.IfExp, ast.Call, *_BINARY, *_COMPARE)  # fmt: skip
    if not isinstance(node, allowed):
        raise InputError(where, f"{type(node).__name__} is not part of the language of constraints")


def names(tree: ast.expr) -> list[str]:
    """Return the variables an expression reads, in order of appearance."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called))


def evaluate(tree: ast.expr, values: Mapping[str, Fraction]) -> Fraction | bool:
    """Return the exact value; raises ZeroDivisionError where the expression has none."""
    if isinstance(tree, ast.Constant):
        return tree.value if isinstance(tree.value, bool) else Fraction(repr(tree.value))
    if isinstance(tree, ast.Name):
        return values[tree.id]
    if isinstance(tree, ast.UnaryOp):
        inner = evaluate(tree.operand, values)
        return not inner if isinstance(tree.op, ast.Not) else -inner if isinstance(tree.op, ast.USub) else inner
    if isinstance(tree, ast.BoolOp):
        decided = isinstance(tree.op, ast.Or)
        return next((decided for part in tree.values if bool(evaluate(part, values)) is decided), not decided)
    if isinstance(tree, ast.Compare):
        terms = [evaluate(term, values) for term in (tree.left, *tree.comparators)]
        return all(_COMPARE[type(op)](a, b) for op, a, b in zip(tree.ops, terms, terms[1:]))
    if isinstance(tree, ast.IfExp):
        return evaluate(tree.body if evaluate(tree.test, values) else tree.orelse, values)
    if isinstance(tree, ast.BinOp):
        return _apply(tree.op, evaluate(tree.left, values), evaluate(tree.right, values))
    return _call(tree, values)


def _apply(op: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, ast.Div):
        return Fraction(left) / right
    if isinstance(op, ast.FloorDiv):
        return Fraction(math.floor(Fraction(left) / right))
    return Fraction(left) ** int(right) if isinstance(op, ast.Pow) else left - right * math.floor(Fraction(left) / right)


def _call(tree: ast.Call, values: Mapping[str, Fraction]) -> Fraction | bool:
    name = tree.func.id
    if name == "implies":
        return not evaluate(tree.args[0], values) or bool(evaluate(tree.args[1], values))
    terms = [evaluate(term, values) for term in tree.args]
    if name == "divides":
        return (Fraction(terms[1]) / terms[0]).denominator == 1
    known = {"min": min, "max": max, "abs": lambda terms: abs(terms[0]), "floor": lambda terms: Fraction(math.floor(terms[0])),
             "ceil": lambda terms: Fraction(math.ceil(terms[0]))}  # fmt: skip
    return known[name](terms)


class Formula:
    """Turns expressions into z3 terms and gathers what must hold for them to have a value: no divisor is zero where it is used."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        import z3

        self._z3 = z3
        self._variables = variables
        self._guards: list = []
        self.defined: list = []

    def of(self, tree: ast.expr) -> Any:
        """Return the z3 term of an expression."""
        z3 = self._z3
        if isinstance(tree, ast.Constant):
            if isinstance(tree.value, bool):
                return z3.BoolVal(tree.value)
            return z3.IntVal(tree.value) if isinstance(tree.value, int) else z3.RealVal(str(Fraction(repr(tree.value))))
        if isinstance(tree, ast.Name):
            return self._variables[tree.id]
        if isinstance(tree, ast.UnaryOp):
            inner = self.of(tree.operand)
            return z3.Not(inner) if isinstance(tree.op, ast.Not) else -inner if isinstance(tree.op, ast.USub) else inner
        if isinstance(tree, ast.BoolOp):
            return self._logic(tree)
        if isinstance(tree, ast.Compare):
            terms = [self.of(term) for term in (tree.left, *tree.comparators)]
            return z3.And([_COMPARE[type(op)](a, b) for op, a, b in zip(tree.ops, terms, terms[1:])])
        if isinstance(tree, ast.IfExp):
            test = self.of(tree.test)
            return z3.If(test, self._under(test, tree.body), self._under(z3.Not(test), tree.orelse))
        return self._arithmetic(tree) if isinstance(tree, ast.BinOp) else self._function(tree)

    def _under(self, guard: Any, tree: ast.expr) -> Any:
        self._guards.append(guard)
        term = self.of(tree)
        self._guards.pop()
        return term

    def _logic(self, tree: ast.BoolOp) -> Any:
        """Later parts are read only where the earlier ones leave the answer open, as in Python."""
        z3, conjunction = self._z3, isinstance(tree.op, ast.And)
        parts, pushed = [], 0
        for part in tree.values:
            parts.append(self.of(part))
            self._guards.append(parts[-1] if conjunction else z3.Not(parts[-1]))
            pushed += 1
        del self._guards[len(self._guards) - pushed :]
        return z3.And(parts) if conjunction else z3.Or(parts)

    def _quotient(self, left: Any, right: Any) -> Any:
        z3 = self._z3
        self.defined.append(z3.Implies(z3.And(self._guards), right != 0) if self._guards else right != 0)
        return self._real(left) / self._real(right)

    def _real(self, term: Any) -> Any:
        return self._z3.ToReal(term) if self._z3.is_int(term) else term

    def _floor(self, term: Any) -> Any:
        return term if self._z3.is_int(term) else self._z3.ToInt(term)

    def _whole(self, left: Any, right: Any) -> Any:
        """Floor of left / right; by the solver's own integer division where that is the same (a positive whole divisor)."""
        z3 = self._z3
        divisor = z3.simplify(right)
        if z3.is_int(left) and z3.is_int_value(divisor) and divisor.as_long() > 0:
            return left / divisor
        return self._floor(self._quotient(left, right))

    def _arithmetic(self, tree: ast.BinOp) -> Any:
        left, right = self.of(tree.left), self.of(tree.right)
        if isinstance(tree.op, ast.Div):
            return self._quotient(left, right)
        if isinstance(tree.op, ast.FloorDiv):
            return self._whole(left, right)
        if isinstance(tree.op, ast.Mod):
            return left - right * self._whole(left, right)
        if isinstance(tree.op, ast.Pow):
            return math.prod([left] * tree.right.value, start=self._z3.IntVal(1))
        return left + right if isinstance(tree.op, ast.Add) else left - right if isinstance(tree.op, ast.Sub) else left * right

    def _function(self, tree: ast.Call) -> Any:
        z3, name = self._z3, tree.func.id
        if name == "implies":
            test = self.of(tree.args[0])
            return z3.Implies(test, self._under(test, tree.args[1]))
        terms = [self.of(term) for term in tree.args]
        if name == "divides":
            return terms[1] - terms[0] * self._whole(terms[1], terms[0]) == 0
        if name in ("floor", "ceil"):
            return self._floor(terms[0]) if name == "floor" else -self._floor(-terms[0])
        if name == "abs":
            return z3.If(terms[0] >= 0, terms[0], -terms[0])
        best = terms[0]
        for term in terms[1:]:
            best = z3.If(term < best if name == "min" else term > best, term, best)
        return best
