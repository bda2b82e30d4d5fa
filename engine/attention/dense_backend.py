"""Attention without pages: each chunk is a whole sequence. Differentiable, and the base of what is asked of a network offline."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import AttentionGeometry
from engine.attention.batch import AttentionBatch
from engine.kernels import reference


class DenseAttention:
    """Attends each chunk to its own keys and values and writes no cache; a chunk that continues an earlier one is refused."""

    capturable = False

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._geometry = geometry
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, batch: AttentionBatch) -> None:
        """Refuse what needs a cache. Raises ValueError."""
        if batch.decodes or any(before for _, before in batch.chunks):
            raise ValueError("dense attention runs whole sequences only")

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """See ``engine.attention.AttentionBackend.attend``; ``keys`` and ``values`` only name the layer."""
        if k is not None:
            self._written[id(keys)] = (k, v)
        k, v = self._written[id(keys)]
        g = self._geometry
        sizes = [new for new, _ in batch.chunks]
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes))
        return torch.cat([reference.whole_attention(*part, scale=g.scale, window=window, slopes=g.slopes) for part in parts])
