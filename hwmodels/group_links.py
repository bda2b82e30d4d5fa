"""What the GPUs of one replica pay to talk to each other: collectives of a group, and sends to the next stage or rank of a ring.

Without a topology the facts are those of the GPU's catalogue entry. With one, ``sim.placement`` gives the rates of the routes
between the very GPUs of the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hwmodels import collectives
from hwmodels.collectives import Collectives
from hwmodels.patterns import LinkRate, ring_allreduce_s
from serving.catalog import Gpu
from serving.layout import Layout


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """``ranks`` GPUs of a tensor-parallel group talk by ``inside``; ``hop`` is the slowest link from a GPU to its partner in the next
    stage or ring rank. Of the GPUs of a stage, ``near`` are in one node; the others are reached over ``across``, one link a GPU.
    """

    ranks: int
    inside: Collectives
    hop: LinkRate
    near: int
    across: LinkRate | None = None
    own_all_reduce_s: Callable[[float], float] | None = None  # instead of that of ``inside``

    def all_reduce_s(self, tensor_bytes: float) -> float:
        """Seconds of an all-reduce of ``tensor_bytes`` in the tensor-parallel group."""
        if self.own_all_reduce_s is not None:
            return self.own_all_reduce_s(tensor_bytes)
        return self.inside.allreduce_s(tensor_bytes, self.ranks)

    def group_all_reduce_s(self, tensor_bytes: float, ranks: int) -> float:
        """The same among ``ranks`` GPUs of the group."""
        return self.all_reduce_s(tensor_bytes) if ranks == self.ranks else self.inside.allreduce_s(tensor_bytes, ranks)

    def all_gather_s(self, gathered_bytes: float, ranks: int) -> float:
        """Seconds until ``ranks`` GPUs of the group hold all ``gathered_bytes``."""
        return self.inside.allgather_s(gathered_bytes, ranks)

    def ring_all_reduce_s(self, tensor_bytes: float, ranks: int) -> float:
        """Seconds of an all-reduce among ring ranks over ``hop``."""
        return ring_allreduce_s(tensor_bytes, ranks, self.hop)

    def all_to_all_s(self, sent_bytes: float, ranks: int) -> float:
        """Seconds until ``ranks`` GPUs have exchanged ``sent_bytes`` each, in equal shares: near and far shares move at once."""
        if self.across is None:
            return self.inside.alltoall_s(sent_bytes, ranks)
        near_bytes, far_bytes = sent_bytes * self.near / ranks, sent_bytes * (ranks - self.near) / ranks
        return max(self.inside.alltoall_s(near_bytes, self.near), self.across.latency_s + far_bytes / self.across.bytes_per_s)

    def send_s(self, size_bytes: float) -> float:
        """Seconds to send ``size_bytes`` to the partner in the next stage."""
        return self.hop.latency_s + size_bytes / self.hop.bytes_per_s


def of_gpu(gpu: Gpu, layout: Layout, all_reduce_s: Callable[[float], float] | None = None) -> GroupLinks:
    """Links by the GPU's own catalogue entry: all GPUs of a stage are joined by its link, as far as that reaches."""
    link = gpu.link
    rate = LinkRate(link.bytes_per_s * link.efficiency, link.latency_s)
    measured = fitted(gpu) if layout.kv_shards > 1 or layout.data > 1 else None
    inside = measured or collectives.from_link(f"{gpu.name} {link.kind}", *rate)
    own = all_reduce_s or alpha_beta(gpu, layout.tensor_parallel)
    return GroupLinks(layout.tensor_parallel, inside, rate, layout.stage_gpus, own_all_reduce_s=own)


def by_library(links: GroupLinks, gpu: Gpu) -> GroupLinks:
    """The same links with every all-reduce by the communication library, as it was measured on this GPU if anybody has."""
    inside = fitted(gpu) or links.inside
    return replace(links, own_all_reduce_s=lambda size: inside.algorithm_s("library", "all_reduce", size, links.ranks))


def fitted(gpu: Gpu) -> Collectives | None:
    """Collectives measured on this GPU's own link, if anybody has."""
    return collectives.load(gpu.name) if gpu.name in collectives.names() else None


def alpha_beta(gpu: Gpu, tensor_parallel: int) -> Callable[[float], float]:
    """Seconds of an all-reduce by bytes: latency + 2 (n-1)/n bytes / (link x efficiency), the kernel set's fit where there is one."""
    link, kernels = gpu.link, gpu.kernels
    fit = kernels.all_reduce.get(tensor_parallel) if kernels.link == link.kind else None
    latency, efficiency = (fit.latency_s, fit.efficiency) if fit else (link.latency_s, link.efficiency)

    def seconds(tensor_bytes: float) -> float:
        return latency + 2.0 * (tensor_parallel - 1) / tensor_parallel * tensor_bytes / (link.bytes_per_s * efficiency)

    return seconds
