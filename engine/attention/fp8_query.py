"""Queries rounded to FP8 over a cache of any dtype: what an asymmetric FP8 kernel computes, by the plain torch back end."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import AttentionGeometry
from engine.attention.batch import AttentionBatch
from engine.attention.torch_backend import TorchAttention

LARGEST = 448.0  # of E4M3


class Fp8QueryAttention:
    """One scale for each token and head brings the largest value to the top of E4M3's range; products are then taken in the wide dtype."""

    capturable = False

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._wide = TorchAttention(geometry)

    def begin(self, batch: AttentionBatch) -> None:
        """See ``engine.attention.AttentionBackend.begin``."""
        self._wide.begin(batch)

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """See ``engine.attention.AttentionBackend.attend``."""
        scale = q.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / LARGEST
        rounded = (q.float() / scale).to(torch.float8_e4m3fn).float() * scale
        return self._wide.attend(rounded.to(q.dtype), k, v, keys, values, batch, window)
