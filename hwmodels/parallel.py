"""Arithmetic of parallel execution: pipeline bubbles, expert and sequence parallelism, KV caches in shards.

Pure functions and facts; no clock and no scheduling. Bytes are of one GPU unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from serving.errors import InputError, nearest

Sharding = Literal["layer", "head", "sequence"]


def pipeline_s(stage_s: Sequence[float], micro_batches: int, transfer_s: float = 0.0) -> float:
    """Seconds until the last of ``micro_batches`` equal micro-batches leaves the last stage.

    The first crosses all stages; each later one follows the slowest stage (its send included) behind.
    """
    sends = [seconds + (transfer_s if i < len(stage_s) - 1 else 0.0) for i, seconds in enumerate(stage_s)]
    return sum(sends) + (micro_batches - 1) * max(sends)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of stage time that idles with equal stages: (p-1)/(m+p-1) (Huang et al., GPipe, 2019)."""
    return (stages - 1) / (micro_batches + stages - 1)


def split_layers(layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage, as even as they go, larger stages first. Raises InputError for more stages than layers."""
    if stages > layers:
        raise InputError("cluster.pipeline_parallel", f"{stages} stages cannot share {layers} layers", f"at most {layers}")
    return [layers // stages + (i < layers % stages) for i in range(stages)]


def expert_exchange_bytes(tokens: int, hidden: int, experts_per_token: int, ranks: int, dtype_bytes: float = 2.0) -> float:
    """Bytes of the vector that one rank exchanges all-to-all to dispatch its share of ``tokens`` (the same again to combine).

    Every token goes to ``experts_per_token`` experts on uniformly drawn ranks; ``sent_bytes`` takes off what stays at home.
    """
    return tokens / ranks * experts_per_token * hidden * dtype_bytes


def expert_imbalance(tokens_by_expert: Sequence[float], ranks: int) -> float:
    """Tokens of the busiest rank over the mean, experts placed on ranks in order: what an expert-parallel step is stretched by."""
    per_rank = len(tokens_by_expert) // ranks
    if per_rank * ranks != len(tokens_by_expert):
        raise InputError("cluster.expert_parallel", f"{len(tokens_by_expert)} experts do not divide into {ranks} ranks", "use a divisor")
    loads = [sum(tokens_by_expert[i * per_rank : (i + 1) * per_rank]) for i in range(ranks)]
    return max(loads) * ranks / sum(loads) if sum(loads) else 1.0


class SequenceParallel(NamedTuple):
    """What sequence parallelism turns one all-reduce into, and the activation bytes left on each rank."""

    reduce_scatter_bytes: float
    all_gather_bytes: float
    activation_bytes: float


def sequence_parallel(tokens: int, hidden: int, ranks: int, dtype_bytes: float = 2.0) -> SequenceParallel:
    """Replace the all-reduce behind a row-parallel layer by a reduce-scatter and an all-gather of the same vector.

    Together they move the bytes of a ring all-reduce; the activations between them are held in shards
    (Korthikanti et al., Reducing activation recomputation in large transformer models, 2022).
    """
    vector = tokens * hidden * dtype_bytes
    return SequenceParallel(vector, vector, vector / ranks)


class KvShards(NamedTuple):
    """A KV cache in shards: bytes on the fullest rank, share saved against one whole copy, exchanges of one decode step."""

    bytes_on_fullest_rank: float
    saved: float  # 1 - fullest / whole
    balance: float  # mean over fullest; 1 is even
    all_reduces: int  # per step
    all_reduce_bytes: float  # of each, for one sequence
    hops: int  # point-to-point sends per step on the critical path


def kv_shards(
    sharding: Sharding,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context_tokens: int,
    ranks: int,
    dtype_bytes: float = 2.0,
    block_tokens: int = 16,
) -> KvShards:
    """Shard the KV cache of one sequence over ``ranks`` GPUs by layer, head or sequence (system B6).

    By layer, whole layers lie on a rank and the activations hop from rank to rank. By head, a rank holds its KV heads of every
    layer (at least one: with fewer heads than ranks they are copied) and attention outputs are summed once a layer. By sequence,
    blocks are dealt round-robin and partial softmaxes (output, maximum, sum per head) are merged once a layer.
    """
    head_bytes = 2 * context_tokens * head_dim * dtype_bytes  # keys and values of one head in one layer
    whole = layers * kv_heads * head_bytes
    if sharding == "layer":
        fullest, total = math.ceil(layers / ranks) * kv_heads * head_bytes, whole
        exchanges = (0, 0.0, min(ranks, layers) - 1)
    elif sharding == "head":
        fullest = layers * math.ceil(kv_heads / ranks) * head_bytes
        total = max(whole, ranks * layers * head_bytes)
        exchanges = (layers, heads * head_dim * dtype_bytes, 0)
    elif sharding == "sequence":
        blocks = math.ceil(context_tokens / block_tokens)
        fullest, total = whole * min(1.0, math.ceil(blocks / ranks) * block_tokens / context_tokens), whole
        exchanges = (layers, heads * (head_dim + 2) * dtype_bytes, 0)
    else:
        raise InputError("kv_cache.sharding", f"there is no sharding '{sharding}'", nearest(sharding, ["layer", "head", "sequence"]))
    return KvShards(fullest, 1 - fullest / whole, total / ranks / fullest, *exchanges)


def kv_capacity_tokens(gpu_bytes: float, weight_bytes: float, kv_bytes_per_token: float, tensor_parallel: int) -> float:
    """Tokens that fit a replica of ``tensor_parallel`` GPUs: what the weights leave of all their memory (case M5).

    ``weight_bytes`` and ``kv_bytes_per_token`` are of the whole model, ``gpu_bytes`` what a GPU has for both.
    """
    return (tensor_parallel * gpu_bytes - weight_bytes) / kv_bytes_per_token
