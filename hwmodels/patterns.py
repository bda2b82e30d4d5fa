"""Closed forms of communication patterns over links of known rate and latency: hierarchies, ring attention, broadcasts.

Each is the plain alternative beside the better one, so that a scenario can show the effect: C3, C4 and C5 of the systems.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hwmodels.collectives import sent_bytes


class LinkRate(NamedTuple):
    """One kind of link among ranks: bytes per second one way, and seconds per message."""

    bytes_per_s: float
    latency_s: float


def ring_allreduce_s(size_bytes: float, ranks: int, link: LinkRate) -> float:
    """Seconds of a ring all-reduce: 2 (n-1) messages, and 2 (n-1)/n of the vector over the slowest link of the ring."""
    if ranks <= 1:
        return 0.0
    return 2 * (ranks - 1) * link.latency_s + sent_bytes("all_reduce", "ring", size_bytes, ranks) / link.bytes_per_s


def tree_allreduce_s(size_bytes: float, ranks: int, link: LinkRate) -> float:
    """Seconds of a reduce and a broadcast along a binomial tree: fewer messages than a ring, the whole vector in each."""
    return 2 * math.ceil(math.log2(max(1, ranks))) * (link.latency_s + size_bytes / link.bytes_per_s)


def hierarchical_allreduce_s(
    size_bytes: float, ranks_inside: int, groups: int, inside: LinkRate, across: LinkRate, shared: bool = True
) -> float:
    """Seconds of an all-reduce among ``groups`` of ``ranks_inside`` GPUs: reduce-scatter inside, all-reduce across, all-gather inside.

    All ranks of a group reduce their share across at once. With ``shared`` they do it over one link of ``across`` between two
    groups, otherwise over one each. The flat ring (``ring_allreduce_s`` over ``across``) sends (n-1)/n of the vector twice
    over the slow link; this sends (g-1)/g of it twice, or that divided by the ranks of a group.
    """
    share_bytes = size_bytes / ranks_inside
    rounds_inside = 0.0
    if ranks_inside > 1:
        each_way_s = sent_bytes("all_gather", "ring", size_bytes, ranks_inside) / inside.bytes_per_s
        rounds_inside = 2 * ((ranks_inside - 1) * inside.latency_s + each_way_s)
    crossing = LinkRate(across.bytes_per_s / (ranks_inside if shared else 1), across.latency_s)
    return rounds_inside + ring_allreduce_s(share_bytes, groups, crossing)


def ring_attention_s(block_compute_s: float, block_transfer_s: float, ranks: int, overlap: bool = True) -> float:
    """Seconds of one attention layer over a sequence cut into ``ranks`` shards whose keys and values circulate.

    Each rank attends to its own block and to n-1 that arrive. Overlapped, a block travels while the one before is computed, so
    a step takes the larger of both; otherwise their sum.
    """
    step_s = max(block_compute_s, block_transfer_s) if overlap else block_compute_s + block_transfer_s
    return block_compute_s + (ranks - 1) * step_s


def linear_broadcast_s(size_bytes: float, receivers: int, link: LinkRate) -> float:
    """Seconds until the last of ``receivers`` has the state when one holder sends it to each in turn."""
    return receivers * (link.latency_s + size_bytes / link.bytes_per_s)


def tree_broadcast_s(
    size_bytes: float, receivers: int, link: LinkRate, chunk_bytes: float, changed: float = 1.0, hash_bytes: int = 32
) -> float:
    """Seconds until the last receiver has the state along a binomial tree of senders, unchanged chunks skipped by their hash.

    Every round doubles the holders. Before its data, a sender offers the hashes of a binary tree over the chunks; only the paths
    to the ``changed`` share of them are compared. With nothing changed the root's hash is all that moves.
    """
    chunks = max(1, math.ceil(size_bytes / chunk_bytes))
    changed_chunks = math.ceil(changed * chunks)
    compared = 1 + 2 * changed_chunks * math.ceil(math.log2(chunks)) if chunks > 1 else 1
    moved_bytes = min(compared, 2 * chunks - 1) * hash_bytes + min(size_bytes, changed_chunks * chunk_bytes)
    return math.ceil(math.log2(receivers + 1)) * (link.latency_s + moved_bytes / link.bytes_per_s)
