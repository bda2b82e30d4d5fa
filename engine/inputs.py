"""A step's inputs flattened into static buffers, sent to the device in one asynchronous copy.

```
sequences: decodes (one token each), then chunks        tokens: in the same order
rows, context [S]   starts [C+1]   tokens, positions, slots, adapters [T]   selected, targets [R]
```
The device buffer has one address for ever, which captured graphs rely on. On CPU it is the host buffer itself. On CUDA two pinned host
buffers take turns, so that a step can be prepared while the copy of the one before is still in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.batch import AttentionBatch
from engine.block_tables import BlockTables
from engine.step import LAST_SAMPLED, SequenceInput, StepInput


class StepLayout(NamedTuple):
    """A flattened step on the host: its sequences in order, how many are decodes, chunk shapes, and which token rows are sampled for whom."""

    sequences: list[SequenceInput]
    decodes: int
    chunks: tuple[tuple[int, int], ...]
    tokens: int
    max_context: int
    row_owner: list[int]  # index into ``sequences`` of each sampled row
    row_positions: np.ndarray  # position of the token that each sampled row produces
    errors: dict[int, str]
    adapted: bool = False  # some sequence has an adapter


class Flat(NamedTuple):
    """Columns of a step's sequences, int64 [S]: new tokens, tokens before them, table rows, sampled rows, tokens dropped from the cache."""

    counts: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    wanted: np.ndarray
    dropped: np.ndarray


class InputBuffers:
    """The buffers and their filling, for at most ``max_tokens`` tokens of ``max_seqs`` sequences."""

    def __init__(self, max_tokens: int, max_seqs: int, block_tokens: int, vocab: int, device: torch.device, *, adapters: bool = False) -> None:
        """``adapters``: sequences may have one."""
        sizes = {"rows": max_seqs, "context": max_seqs, "starts": max_seqs + 1}
        sizes |= dict.fromkeys(("tokens", "positions", "slots", "selected", "targets"), max_tokens)
        if adapters:
            sizes["adapters"] = max_tokens
        self._adapters = adapters
        self._block_tokens = block_tokens
        self._vocab = vocab
        self._cuda = device.type == "cuda"
        self._pinned = [torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=self._cuda) for _ in range(2 if self._cuda else 1)]
        self._sent: list[torch.cuda.Event | None] = [None] * len(self._pinned)
        self._flat = torch.zeros_like(self._pinned[0], device=device) if self._cuda else self._pinned[0]
        self._turn = 0
        self._hosts = [_views(flat.numpy(), sizes) for flat in self._pinned]
        self.device = _views(self._flat, sizes)
        self._copies = torch.cuda.Stream(device) if self._cuda else None

    def fill(self, batch: StepInput, tables: BlockTables) -> StepLayout:
        """Flatten ``batch`` into the host buffer whose turn it is. A sequence with a token outside the vocabulary is left out and named in ``errors``."""
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()
        for request_id in batch.released:
            tables.release(request_id)
        errors = self._bad_tokens(batch.sequences)
        sequences = [seq for seq in batch.sequences if seq.request_id not in errors] if errors else list(batch.sequences)
        counts = [len(seq.tokens) for seq in sequences]
        if counts and max(counts) > 1:
            sequences.sort(key=lambda seq: len(seq.tokens) > 1)  # stable: decodes first, else as given
            counts = [len(seq.tokens) for seq in sequences]
        decodes = counts.count(1)
        # Transposed in C: a loop over hundreds of sequences per column would cost as much as the scheduler.
        ids, tokens, start, blocks, wanted, _, dropped, _, adapter = zip(*sequences) if sequences else ((),) * 9
        rows = list(map(tables.row, ids, blocks))
        flat = Flat(*(np.array(column, dtype=np.int64) for column in (counts, start, rows, wanted, dropped)))
        host = self._hosts[self._turn]
        total = self._fill_tokens(host, list(chain.from_iterable(tokens)), flat, tables)
        host["rows"][: len(rows)] = rows
        if self._adapters:
            host["adapters"][:total] = np.repeat(np.array(adapter, dtype=np.int32), flat.counts)
        held = flat.starts - flat.dropped
        host["context"][: len(rows)] = held + flat.counts
        np.cumsum(flat.counts[decodes:], out=host["starts"][1 : len(rows) - decodes + 1])
        owner, positions = _fill_selected(host, flat)
        chunks = tuple(zip(counts[decodes:], held[decodes:].tolist()))
        longest = int(held[:decodes].max()) + 1 if decodes else 0
        return StepLayout(sequences, decodes, chunks, total, longest, owner, positions, errors, self._adapters and max(adapter, default=-1) >= 0)

    def _bad_tokens(self, sequences: Sequence[SequenceInput]) -> dict[int, str]:
        low, high = LAST_SAMPLED, self._vocab
        flat = list(chain.from_iterable(seq.tokens for seq in sequences))
        if not flat or (min(flat) >= low and max(flat) < high):
            return {}
        bad = [seq for seq in sequences if min(seq.tokens) < low or max(seq.tokens) >= high]
        return {seq.request_id: f"a token is outside the vocabulary of {high}" for seq in bad}

    def _fill_tokens(self, host: dict, tokens: list[int], flat: Flat, tables: BlockTables) -> int:
        total = len(tokens)
        if total > len(host["tokens"]) or len(flat.rows) > len(host["rows"]):
            raise RuntimeError(f"a step of {total} tokens and {len(flat.rows)} sequences exceeds {len(host['tokens'])} and {len(host['rows'])}")
        if total == len(flat.rows):  # decodes only
            positions, rows, at = flat.starts, flat.rows, flat.starts - flat.dropped
        else:
            positions = np.arange(total) - np.repeat(flat.counts.cumsum() - flat.counts - flat.starts, flat.counts)
            rows = np.repeat(flat.rows, flat.counts)
            at = positions - np.repeat(flat.dropped, flat.counts)
        blocks = tables.host[rows, at // self._block_tokens]
        host["tokens"][:total] = tokens
        host["positions"][:total] = positions
        host["slots"][:total] = blocks * np.int64(self._block_tokens) + at % self._block_tokens
        return total

    def pad(self, layout: StepLayout, size: int) -> None:
        """Fill the rows beyond the decodes up to ``size``: one token at position 0 of the table row of zeros, written to the reserved block."""
        host, used = self._hosts[self._turn], layout.decodes
        for name, value in (("rows", 0), ("context", 1), ("tokens", 0), ("positions", 0), ("slots", 0), ("adapters", -1)):
            if name in host:
                host[name][used:size] = value

    def send(self, tables: BlockTables) -> None:
        """Copy the filled buffer and the changed block-table entries to the device; the current stream waits for the copy, the host does not."""
        if self._copies is None:
            return
        compute = torch.cuda.current_stream()
        # The step before still reads the device buffer: its kernels come first.
        self._copies.wait_stream(compute)
        with torch.cuda.stream(self._copies):
            self._flat.copy_(self._pinned[self._turn], non_blocking=True)
            tables.upload()
            event = torch.cuda.Event()
            event.record()
        self._sent[self._turn] = event
        compute.wait_event(event)

    def attention_batch(self, layout: StepLayout, table: Tensor, decodes: int, *, recorded: bool = False) -> AttentionBatch:
        """Return what attention reads, as views of the device buffers; ``decodes`` may exceed the layout's by padding.

        ``recorded``: for a graph, which must fit later batches too, with adapters and without.
        """
        sequences = decodes + len(layout.chunks)
        tokens = decodes + layout.tokens - layout.decodes
        view = self.device
        return AttentionBatch(
            decodes=decodes,
            rows=view["rows"][:sequences],
            context=view["context"][:sequences],
            starts=view["starts"][: len(layout.chunks) + 1],
            slots=view["slots"][:tokens],
            table=table,
            chunks=layout.chunks,
            max_context=layout.max_context,
            adapters=view["adapters"][:tokens] if layout.adapted or (recorded and self._adapters) else None,
        )


def _views(flat, sizes: dict[str, int]) -> dict:
    ends = np.cumsum(list(sizes.values())).tolist()
    return {name: flat[end - size : end] for (name, size), end in zip(sizes.items(), ends)}


def _fill_selected(host: dict, flat: Flat) -> tuple[list[int], np.ndarray]:
    """Fill which token rows are sampled, and the table row that remembers each as the sequence's last token (0: nobody's).

    Returns the index of the sequence that owns each sampled row, and the position of the token it produces.
    """
    owner = np.repeat(np.arange(len(flat.rows)), flat.wanted)
    back = np.repeat(flat.wanted.cumsum(), flat.wanted) - np.arange(len(owner))  # 1 for a sequence's last row
    host["selected"][: len(owner)] = flat.counts.cumsum()[owner] - back
    host["targets"][: len(owner)] = np.where(back == 1, flat.rows[owner], 0)
    return owner.tolist(), (flat.starts + flat.counts)[owner] - back + 1
