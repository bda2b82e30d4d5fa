"""The pointwise operations by name: ``torch`` (the reference) or ``triton`` (the kernels)."""

from __future__ import annotations

import importlib
from types import ModuleType

from serving.errors import InputError, nearest


def load_ops(name: str, where: str = "engine.ops") -> ModuleType:
    """Return the module with ``rmsnorm``, ``add_rmsnorm``, ``rope`` and ``silu_mul``. Raises InputError for an unknown name or without Triton."""
    if name not in OPS:
        raise InputError(where, f"'{name}' is not known", nearest(name, OPS))
    try:
        return importlib.import_module(OPS[name])
    except ImportError as error:
        raise InputError(where, f"'{name}' cannot be loaded: {error}") from None


def load_chosen(name: str) -> ModuleType:
    """Return the module with ``add_adapters`` and ``experts``, products of rows that choose their matrix. Raises as ``load_ops``."""
    load_ops(name)
    return importlib.import_module(CHOSEN[name])


CHOSEN = {"torch": "engine.kernels.reference", "triton": "engine.kernels.chosen"}
OPS = {"torch": "engine.kernels.reference", "triton": "engine.kernels.pointwise"}
