"""Who may import whom: the arrows between the rooms, read from the syntax tree of every module."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {  # room -> the rooms it may import from
    "serving": {"serving"},
    "hwmodels": {"hwmodels", "serving"},
    "sim": {"sim", "serving", "hwmodels"},
    "engine": {"engine", "serving"},
    "validate": {"validate", "sim", "engine", "serving", "hwmodels"},
}
NEVER = {  # room -> packages it must not know, wherever the import stands
    "serving": {"simpy", "torch", "triton", "ray", "plotly", "scipy"},
    "hwmodels": {"simpy", "torch", "triton"},
    "sim": {"torch", "triton"},
    "engine": {"simpy"},
    "validate": set(),
}
SERVING_NEEDS_ONLY = {"numpy", "pydantic", "pydantic_core", "yaml", *sys.stdlib_module_names}
LAZY = {"pandas", "pyarrow", "scipy", "plotly", "ray", "optuna", "z3"}  # slow to import: only inside functions
LAZY_ROOMS = ("serving", "hwmodels", "sim", "engine")


def imports(tree: ast.Module) -> Iterator[tuple[str, bool, int]]:
    """Yield (imported module, whether importing this file imports it, line)."""

    def walk(node: ast.AST, runs: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, runs, child.lineno) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield "." if child.level else child.module, runs, child.lineno
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            else:
                yield from walk(child, runs)

    return walk(tree, True)


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def breaches(room: str, source: str) -> list[str]:
    """Return what is wrong with the imports of one module of ``room``."""
    found = []
    for name, runs, line in imports(ast.parse(source)):
        top = name.split(".")[0]
        if top in ROOMS and top not in ROOMS[room]:
            found.append(f"line {line}: {room} must not import {top}")
        elif top in NEVER[room]:
            found.append(f"line {line}: {room} must not know {top}")
        elif runs and top in LAZY and room in LAZY_ROOMS:
            found.append(f"line {line}: {top} is slow to import: do it inside the function that needs it")
        elif top == "twinserve":
            found.append(f"line {line}: the command composes the rooms, never the other way round")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_the_arrows_between_the_rooms(room):
    wrong = [f"{path.relative_to(ROOT)} {each}" for path in modules(room) for each in breaches(room, path.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_serving_needs_little():
    shared = [path for path in modules("serving") if "http" not in path.relative_to(ROOT).parts]
    wrong = [
        f"{path.relative_to(ROOT)} line {line}: {name}"
        for path in shared
        for name, runs, line in imports(ast.parse(path.read_text(encoding="utf-8")))
        if runs and name.split(".")[0] not in SERVING_NEEDS_ONLY | {"serving"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("sim", "import torch"),
        ("sim", "def f():\n    from engine.loop import Loop"),
        ("engine", "from hwmodels.latency import build"),
        ("engine", "def f():\n    import simpy"),
        ("serving", "import sim"),
        ("serving", "import pandas"),
        ("hwmodels", "import twinserve"),
    ],
)
def test_a_breach_is_seen(room, source):
    assert breaches(room, source)


def test_types_alone_are_no_breach_of_laziness():
    assert not breaches("serving", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\ndef f():\n    import pandas")


def test_the_simulator_runs_without_the_slow_packages():
    code = "import sys, sim.run; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60).stdout.split()
    assert not {"torch", "triton", "pandas", "pyarrow", "scipy", "plotly", "ray", "rich"} & set(loaded)
