"""A token-level trace: where each sampled token looked, at one chosen layer, and how spread its attention was."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.batch import AttentionBatch
from engine.inputs import StepLayout
from engine.kv_cache import KvCache
from engine.model import Observer
from engine.step import SequenceInput


class TracedToken(NamedTuple):
    """One sampled row: the request, the position that attended, the entropy (nats) of its attention averaged over heads, and its main sources as (position, weight)."""

    request_id: int
    position: int
    entropy: float
    sources: tuple[tuple[int, float], ...]
    held: int  # tokens that it could look at; fewer than position + 1 where some were dropped, and sources then count the rest

    @property
    def spread(self) -> float:
        """The entropy over that of even attention, 0 to 1."""
        return self.entropy / math.log(self.held) if self.held > 1 else 0.0


class AttentionTrace:
    """Records attention of layer ``layer`` (negative counts from the last) with the ``top`` source tokens of each sampled row.

    It recomputes the scores of those rows from the cached keys in float32, so it works with every back end that fills the cache.
    Positional biases and windows are not part of it.
    """

    def __init__(self, layer: int = -1, top: int = 8, *, keep: bool = True) -> None:
        """Without ``keep`` a step's tokens are forgotten once its spread has been read."""
        self.keep = keep
        self._layer = layer
        self._top = top
        self.tokens: list[TracedToken] = []
        self._read = 0

    def take_spread(self) -> dict[int, float]:
        """Entropy over its maximum by request, of the rows recorded since the last call (each request's last row)."""
        fresh, self._read = self.tokens[self._read :], len(self.tokens)
        if not self.keep:
            self.tokens.clear()
            self._read = 0
        return {token.request_id: token.spread for token in fresh}

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
            self.tokens.append(self._one(q[row], batch.table[batch.rows[owner].long()], keys, position, sequence))

    def _one(self, query: Tensor, table_row: Tensor, keys: Tensor, position: int, sequence: SequenceInput) -> TracedToken:
        held = position + 1 - sequence.dropped
        blocks = table_row[: (held - 1) // keys.shape[1] + 1].long()
        seen = keys[blocks].flatten(0, 1)[:held].float()  # [L, K, D]
        grouped = query.float().view(keys.shape[2], -1, query.shape[-1])  # [K, H/K, D]
        weight = torch.einsum("kgd,lkd->kgl", grouped, seen).mul(query.shape[-1] ** -0.5).softmax(-1).mean((0, 1))
        best, at = weight.topk(min(self._top, held))
        sources = tuple(zip(at.tolist(), best.tolist()))
        return TracedToken(sequence.request_id, position, float(torch.special.entr(weight).sum()), sources, held)
