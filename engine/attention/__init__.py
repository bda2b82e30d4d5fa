"""Attention back ends by name: ``torch``, ``triton``, ``fp8_query`` (rounded queries), ``dense`` (whole sequences, offline), or a third party's own as ``module:Class``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.architecture import Architecture
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


def geometry(shape: Architecture, max_decodes: int, device: torch.device) -> AttentionGeometry:
    """Return the geometry of a network's attention on ``device``, for at most ``max_decodes`` decodes a step."""
    slopes = alibi_slopes(shape.heads).to(device) if shape.positions == "alibi" else None
    return AttentionGeometry(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, slopes, max_decodes, device)


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head, float32 [heads]: 2^(−8i/n), odd steps of 2n for the heads beyond a power of two (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


class AttentionBackend(Protocol):
    """One way to compute attention over pages. Built as ``Backend(geometry)``, once per runner.

    ``capturable`` says that ``begin`` and ``attend`` read no value on the host for a decode-only batch, so that a CUDA graph may record them.
    """

    capturable: bool

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare a step, before its first layer."""
        ...

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """Write ``k``, ``v`` [T, K, D] to the layer's pages ``keys``, ``values``, then return the attention of ``q`` [T, H, D], [T, H, D].

        They are None where an earlier layer has written to these pages in this step: this one reads them too.

        Row strides of q, k and v may exceed their width; rows are decodes first, then the chunks in order. ``window``: 0 sees all.
        """
        ...


def load(name: str, built_for: AttentionGeometry, where: str = "engine.attention") -> AttentionBackend:
    """Build the back end ``name``. Raises InputError for an unknown name, or a module or class that cannot be imported."""
    target = BACKENDS.get(name, name)
    module, _, attribute = target.partition(":")
    if not attribute:
        raise InputError(where, f"'{name}' is no attention back end", nearest(name, [*BACKENDS, "module:Class"]))
    try:
        factory: Callable[[AttentionGeometry], AttentionBackend] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(where, f"'{name}' cannot be loaded: {error}") from None
    return factory(built_for)


BACKENDS: dict[str, str] = {
    "dense": "engine.attention.dense_backend:DenseAttention",
    "fp8_query": "engine.attention.fp8_query:Fp8QueryAttention",
    "torch": "engine.attention.torch_backend:TorchAttention",
    "triton": "engine.attention.triton_backend:TritonAttention",
}
