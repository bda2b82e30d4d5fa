"""What attention must know of a step's flattened batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class AttentionBatch:
    """A flattened batch of S sequences and T tokens: D decodes of one token each, then C chunks.

    ``rows`` int32 [S]      the row of ``table`` that holds each sequence's blocks
    ``context`` int32 [S]   tokens in the cache once this step's are written
    ``starts`` int32 [C+1]  where each chunk begins among the T − D chunk tokens
    ``slots`` int32 [T]     where each token's key and value are written
    ``table`` int32 [rows, columns]
    ``chunks``              (new tokens, cached tokens before them) of each chunk, on the host
    ``adapters`` int32 [T]  the adapter slot of each token's sequence, -1: none; None where the whole batch has none
    ``max_context``         the longest decode context, on the host; a captured graph must not depend on it
    """

    decodes: int
    rows: Tensor
    context: Tensor
    starts: Tensor
    slots: Tensor
    table: Tensor
    chunks: tuple[tuple[int, int], ...] = ()
    max_context: int = 0
    adapters: Tensor | None = None
