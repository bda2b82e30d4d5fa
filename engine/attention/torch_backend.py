"""Attention in plain torch: the CPU's own path, and the meaning of every other back end."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import AttentionGeometry
from engine.attention.batch import AttentionBatch
from engine.kernels import reference


class TorchAttention:
    """Gathers the pages of each sequence and calls torch's fused attention. Its sizes follow the contexts: not capturable."""

    capturable = False

    def __init__(self, geometry: AttentionGeometry) -> None:
        self._scale = geometry.scale
        self._slopes = geometry.slopes
        self._decode_table: Tensor | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Gather the decodes' table rows once for all layers."""
        self._decode_table = batch.table[batch.rows[: batch.decodes].long()] if batch.decodes else None

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, batch: AttentionBatch, window: int) -> Tensor:
        """See ``engine.attention.AttentionBackend.attend``."""
        if k is not None:
            reference.kv_write(k, v, keys, values, batch.slots)
        options = {"scale": self._scale, "window": window, "slopes": self._slopes}
        parts = []
        decodes = batch.decodes
        if self._decode_table is not None:
            context = batch.context[:decodes]
            parts.append(reference.decode_attention(q[:decodes], keys, values, self._decode_table, context, max_context=batch.max_context, **options))
        start = decodes
        for row, (new, before) in zip(batch.rows[decodes:].tolist(), batch.chunks):
            parts.append(reference.prefill_attention(q[start : start + new], keys, values, batch.table[row], before, **options))
            start += new
        return parts[0] if len(parts) == 1 else torch.cat(parts)
