"""Block tables on the device: one row per running request, kept from step to step so that a step uploads only what changed.

```
row 0        zeros: padded rows of a batch read the reserved block 0
row r        the blocks of one request, in order; columns beyond its length are stale and never read
```
On CPU the device table *is* the host table. On CUDA changed entries are collected, staged in pinned memory and scattered.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: How many of a row's last known blocks are compared with the table at hand; a step rolls back fewer.
COMPARED = 4


class BlockTables:
    """Rows for at most ``max_seqs`` requests of at most ``max_blocks`` blocks."""

    def __init__(self, max_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.host = np.zeros((max_seqs + 1, max_blocks), dtype=np.int32)
        on_host = device.type == "cpu"
        self.table: Tensor = torch.from_numpy(self.host) if on_host else torch.zeros(self.host.shape, dtype=torch.int32, device=device)
        self._lengths = [0] * (max_seqs + 1)
        self._tails: list[list[int]] = [[] for _ in self._lengths]
        self._free = list(range(max_seqs, 0, -1))
        self._rows: dict[int, int] = {}
        self._changed: list[tuple[int, int, int]] | None = None if on_host else []  # (row, first column, end column)

    def row(self, request_id: int, blocks: list[int]) -> int:
        """Return the request's row, brought up to date with its ``blocks``.

        A table normally only grows; one that is shorter than known or differs in the last blocks known (drafts rolled back) is rewritten.
        A request that lost all its blocks must have been released before it comes back. Raises RuntimeError when all rows are taken.
        """
        row = self._rows.get(request_id)
        if row is None:
            if not self._free:
                raise RuntimeError(f"request {request_id}: all {len(self._lengths) - 1} block-table rows are taken")
            row = self._rows[request_id] = self._free.pop()
            self._lengths[row], self._tails[row] = 0, []
        known, tail = self._lengths[row], self._tails[row]
        if len(blocks) == known and blocks[-COMPARED:] == tail:
            return row
        if blocks[max(0, known - COMPARED) : known] != tail:
            known = 0
        self.host[row, known : len(blocks)] = blocks[known:]
        if self._changed is not None:
            self._changed.append((row, known, len(blocks)))
        self._lengths[row], self._tails[row] = len(blocks), blocks[-COMPARED:]
        return row

    def release(self, request_id: int) -> None:
        """Give the request's row up (finished, aborted or preempted); unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def release_all(self) -> None:
        """Give every row up: whoever held them is gone."""
        for request_id in list(self._rows):
            self.release(request_id)

    def upload(self) -> None:
        """Send the entries changed since the last call to the device, on the current stream; nothing to do on CPU."""
        if not self._changed:
            return
        width = self.host.shape[1]
        at = np.concatenate([np.arange(row * width + first, row * width + end) for row, first, end in self._changed])
        self._changed.clear()
        staged = torch.from_numpy(np.stack((at, self.host.reshape(-1)[at].astype(np.int64)))).pin_memory()
        index, blocks = staged.to(self.table.device, non_blocking=True)
        self.table.view(-1).index_copy_(0, index, blocks.to(torch.int32))
