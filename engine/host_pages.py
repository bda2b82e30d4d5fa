"""KV pages that left the device: copies in (pinned) host memory by content key, out when the pool evicts them, in when it reloads them.

The pool's lower tiers decide which pages are kept (``serving.kv_tiers``); here are their contents. Moves of a step run before its kernels, in
the order in which they were decided, on the same stream: a page is copied out before anything overwrites it and in before anything reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serving.kv_tiers import Move

if TYPE_CHECKING:
    from engine.kv_cache import KvCache

SLAB = 64  # pages of host memory that are allocated at once


class HostPages:
    """All layers' keys and values of the pages that were copied out."""

    def __init__(self, cache: KvCache) -> None:
        self._layers = cache.pages
        self._device = cache.device
        self._pinned = self._device.type == "cuda"
        self._slabs: list[list[tuple[Tensor, ...]]] = []  # by slab and layer: the parts of a page, [SLAB, ...] each
        self._free: list[tuple[int, int]] = []
        self._at: dict[object, tuple[int, int]] = {}
        self.copied_out = 0
        self.copied_in = 0

    def apply(self, moves: Iterable[Move]) -> None:
        """Make ``moves`` in order."""
        for kind, key, block in moves:
            if kind == "out":
                self._out(key, block)
            elif kind == "in":
                self._in(key, block)
            else:
                self._free.append(self._at.pop(key))

    def _raw(self, layer: Tensor | object, block: Tensor) -> tuple[Tensor, ...]:
        return (layer.index_select(0, block),) if isinstance(layer, Tensor) else layer.raw(block)

    def _out(self, key: object, block: int) -> None:
        index = torch.tensor([block], device=self._device)
        parts = [self._raw(layer, index) for layer in self._layers]
        place = self._at.get(key)
        if place is None:
            if not self._free:
                self._grow(parts)
            place = self._at[key] = self._free.pop()
        slab, row = place
        for kept, fresh in zip(self._slabs[slab], parts):
            for host, device in zip(kept, fresh):
                host[row].copy_(device[0], non_blocking=True)
        self.copied_out += 1

    def _in(self, key: object, block: int) -> None:
        slab, row = self._at[key]
        index = torch.tensor([block], device=self._device)
        for layer, kept in zip(self._layers, self._slabs[slab]):
            parts = tuple(host[row : row + 1].to(self._device, non_blocking=True) for host in kept)
            if isinstance(layer, Tensor):
                layer.index_copy_(0, index, parts[0])
            else:
                layer.put_raw(index, parts)
        self.copied_in += 1

    def _grow(self, parts: list[tuple[Tensor, ...]]) -> None:
        slab = [tuple(torch.empty((SLAB, *part.shape[1:]), dtype=part.dtype, pin_memory=self._pinned) for part in layer) for layer in parts]
        self._free.extend((len(self._slabs), row) for row in reversed(range(SLAB)))
        self._slabs.append(slab)
