"""Images in prompts: a small encoder whose output is projected once into the network's width, as rows behind its embedding table.

A visual token is an id beyond the vocabulary; its embedding is such a row. From there on it is a token like any other: its keys and values are pages,
named by the image, which every text behind the same image reuses (system B12). The encoder is a toy with random weights (one layer of attention over the
patches of a made-up picture, half as wide as the network, then an aligning projection behind a tanh gate): it costs what it costs, and sees nothing.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model import DecoderWeights
from serving.errors import InputError
from serving.memory import GIB
from serving.rng import stream
from serving.scenario import Scenario
from serving.workload.images import image_blocks

PATCH = 48  # numbers of one patch: 4 x 4 pixels of three colours
MOST_BYTES = 4 * GIB  # of rows: all images of a workload are kept


class Encoder:
    """Patches [n, PATCH] to rows [n, hidden] of about the size that ``embedding`` has."""

    def __init__(self, embedding: Tensor, seed: int, gate: float = 1.0) -> None:
        hidden = embedding.shape[1]
        wide = max(1, hidden // 2)
        maker = torch.Generator().manual_seed(seed)

        def made(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=maker) / math.sqrt(columns)).to(embedding)

        self._patch, self._qkv, self._align = made(wide, PATCH), made(3 * wide, wide), made(hidden, wide)
        self._gate = math.tanh(gate)
        self._size = float(embedding[: min(len(embedding), 4096)].float().pow(2).mean().sqrt())

    def rows(self, patches: Tensor) -> Tensor:
        """Encode, look at all patches from each, project and scale."""
        x = F.linear(patches, self._patch)
        q, k, v = F.linear(x, self._qkv).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        aligned = F.linear(F.rms_norm(x, x.shape[-1:]), self._align)
        return self._gate * self._size * F.rms_norm(aligned, aligned.shape[-1:])


class VisualTokens:
    """The visual tokens of a workload's images; each image is encoded when it is first asked about, and never again."""

    def __init__(self, blocks: list[int], block_tokens: int, table: Tensor, vocab: int, seed: int) -> None:
        """``table`` [vocab + rows, hidden] is the embedding table with the rows to fill; ``blocks`` are the KV blocks of each image."""
        self._lengths = [count * block_tokens for count in blocks]
        self._first = [vocab]
        for length in self._lengths[:-1]:
            self._first.append(self._first[-1] + length)
        self._table, self._seed = table, seed
        self._encoder = Encoder(table[:vocab], seed)
        self._done: set[int] = set()
        self._seconds = 0.0

    def tokens_of(self, image: int) -> list[int]:
        """Ids of the image's tokens, whose rows are there from now on."""
        first, length = self._first[image], self._lengths[image]
        if image not in self._done:
            began_s = time.thread_time()
            pixels = torch.from_numpy(stream(self._seed, f"image {image}").standard_normal((length, PATCH))).to(self._table)
            self._table[first : first + length] = self._encoder.rows(pixels)
            self._done.add(image)
            self._seconds += time.thread_time() - began_s
        return list(range(first, first + length))

    def bytes(self) -> int:
        """Of the embedding table, which stands beside the one that the weights hold."""
        return self._table.numel() * self._table.element_size()

    def report(self) -> dict[str, Any]:
        """The ``images`` part of summary.json: images encoded, and this thread's seconds for it, which the engine's clock does not count."""
        return {"encoded": len(self._done), "encode_s": self._seconds}


def with_images(scenario: Scenario, weights: DecoderWeights) -> tuple[DecoderWeights, VisualTokens | None]:
    """The weights with room for the scenario's images behind the embedding table; unchanged without any. Raises InputError."""
    spec = scenario.workload.images
    if spec is None:
        return weights, None
    if scenario.speculation is not None or scenario.cluster.tensor_parallel > 1:
        raise InputError("workload.images", "the engine sees images on one device, and drafts nothing meanwhile", "leave those out")
    block_tokens, embedding = scenario.kv_cache.block_tokens, weights.embedding
    blocks = image_blocks(spec, block_tokens, stream(scenario.seed, "workload.images.tokens"))
    rows = sum(blocks) * block_tokens
    held = rows * embedding.shape[1] * embedding.element_size()
    if held > MOST_BYTES:
        raise InputError("workload.images.count", f"{spec.count} images of {rows:,} tokens take {held / GIB:.1f} GiB", f"at most {MOST_BYTES / GIB:g}")
    table = torch.cat((embedding, embedding.new_zeros(rows, embedding.shape[1])))
    return dataclasses.replace(weights, embedding=table), VisualTokens(blocks, block_tokens, table, embedding.shape[0], scenario.seed)
