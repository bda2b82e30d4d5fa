"""Which share of a step's tokens the busiest expert rank gets: popularity of experts, and where they are placed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwmodels.parallel import expert_imbalance
from serving.errors import InputError
from serving.layout import Layout
from serving.llm import Llm

if TYPE_CHECKING:
    import numpy as np

    from serving.scenario.parallel import Experts


def busiest_rank(experts: Experts, llm: Llm, layout: Layout, rng: np.random.Generator) -> float:
    """Tokens of the busiest expert rank over the mean; 1 where experts are sliced. ``rng`` draws a placement without regard to load.

    Raises InputError when a measured load does not name every expert.
    """
    if llm.moe is None or (experts.load and len(experts.load) != llm.moe.experts):
        if experts.load:
            count = llm.moe.experts if llm.moe is not None else 0
            raise InputError("cluster.experts.load", f"names {len(experts.load)} experts; {llm.name} has {count}")
        return 1.0
    ranks = layout.expert_parallel
    if ranks == 1 or not (experts.load or experts.zipf):
        return 1.0
    loads = list(experts.load) or [(1 + rank) ** -experts.zipf for rank in range(llm.moe.experts)]
    if experts.placement == "balanced":
        return expert_imbalance(balanced(loads, ranks), ranks)
    return expert_imbalance([loads[i] for i in rng.permutation(len(loads))], ranks)


def balanced(loads: list[float], ranks: int) -> list[float]:
    """``loads`` in an order that spreads them: heaviest first, each to the least loaded rank that has a place (largest processing time
    first; Graham, 1969).
    """
    places = len(loads) // ranks
    held: list[list[float]] = [[] for _ in range(ranks)]
    for load in sorted(loads, reverse=True):
        open_ranks = [rank for rank in range(ranks) if len(held[rank]) < places]
        held[min(open_ranks, key=lambda rank: (sum(held[rank]), rank))].append(load)
    return [load for rank in held for load in rank]
