"""Attention back ends by name: ``torch``, ``triton``, or a third party's own as ``module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.batch import AttentionBatch
from serving.errors import InputError, nearest


class AttentionGeometry(NamedTuple):
    """What a back end is built for: head counts, head dimension, score scale, ALiBi slopes [heads] or None, the largest decode batch, the device."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    slopes: Tensor | None
    max_decodes: int
    device: torch.device


class AttentionBackend(Protocol):
    """One way to compute attention over pages. Built as ``Backend(geometry)``, once per runner.

    ``capturable`` says that ``begin`` and ``attend`` read no value on the host for a decode-only batch, so that a CUDA graph may record them.
    """

    capturable: bool

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare a step, before its first layer."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """Write ``k``, ``v`` [T, K, D] to the layer's pages ``keys``, ``values``, then return the attention of ``q`` [T, H, D], [T, H, D].

        Row strides of q, k and v may exceed their width; rows are decodes first, then the chunks in order. ``window``: 0 sees all.
        """
        ...


def load(name: str, geometry: AttentionGeometry, where: str = "engine.attention") -> AttentionBackend:
    """Build the back end ``name``. Raises InputError for an unknown name, or a module or class that cannot be imported."""
    target = BACKENDS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise InputError(where, f"'{name}' is no attention back end", nearest(name, [*BACKENDS, "module:Class"]))
    try:
        factory: Callable[[AttentionGeometry], AttentionBackend] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(where, f"'{name}' cannot be loaded: {error}") from None
    return factory(geometry)


BACKENDS: dict[str, str] = {
    "torch": "engine.attention.torch_backend:TorchAttention",
    "triton": "engine.attention.triton_backend:TritonAttention",
}
