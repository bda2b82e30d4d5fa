"""A token-level trace: where each sampled token looked, at one chosen layer, and how spread its attention was."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.batch import AttentionBatch
from engine.inputs import StepLayout
from engine.kv_cache import KvCache
from engine.model import Observer


class TracedToken(NamedTuple):
    """One sampled row: the request, the position that attended, the entropy (nats) of its attention averaged over heads, and its main sources as (position, weight)."""

    request_id: int
    position: int
    entropy: float
    sources: tuple[tuple[int, float], ...]


class AttentionTrace:
    """Records attention of layer ``layer`` (negative counts from the last) with the ``top`` source tokens of each sampled row.

    It recomputes the scores of those rows from the cached keys in float32, so it works with every back end that fills the cache.
    Positional biases and windows are not part of it.
    """

    def __init__(self, layer: int = -1, top: int = 8) -> None:
        self._layer = layer
        self._top = top
        self.tokens: list[TracedToken] = []

    def observer(self, batch: AttentionBatch, cache: KvCache, layout: StepLayout) -> Observer:
        """Return the hook for one step."""
        chosen = self._layer % len(cache.keys)

        def observe(layer: int, q: Tensor, residual: Tensor) -> None:
            if layer == chosen:
                self._record(q, batch, cache.keys[layer], layout)

        return observe

    def _record(self, q: Tensor, batch: AttentionBatch, keys: Tensor, layout: StepLayout) -> None:
        ends = torch.tensor([len(seq.tokens) for seq in layout.sequences]).cumsum(0).tolist()
        for owner, produced in zip(layout.row_owner, layout.row_positions.tolist()):
            sequence = layout.sequences[owner]
            position = produced - 1
            row = ends[owner] - (sequence.start + len(sequence.tokens) - position)
            self.tokens.append(self._one(q[row], batch.table[batch.rows[owner].long()], keys, position, sequence.request_id))

    def _one(self, query: Tensor, table_row: Tensor, keys: Tensor, position: int, request_id: int) -> TracedToken:
        blocks = table_row[: position // keys.shape[1] + 1].long()
        seen = keys[blocks].flatten(0, 1)[: position + 1].float()  # [L, K, D]
        grouped = query.float().view(keys.shape[2], -1, query.shape[-1])  # [K, H/K, D]
        weight = torch.einsum("kgd,lkd->kgl", grouped, seen).mul(query.shape[-1] ** -0.5).softmax(-1).mean((0, 1))
        best, at = weight.topk(min(self._top, position + 1))
        sources = tuple(zip(at.tolist(), best.tolist()))
        return TracedToken(request_id, position, float(torch.special.entr(weight).sum()), sources)
