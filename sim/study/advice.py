"""Break-even sentences: what each choice is worth, by the cheapest fleet under each of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.study.search import FOUND, Fate


def break_even(ranked: Sequence[Fate], rows: Sequence[Mapping[str, Any]], compared: Sequence[str]) -> list[str]:
    """One sentence for every value that was compared with the cheapest fleet's own; ``rows`` are those of ``ranked``."""
    pairs = [(fate, row) for fate, row in zip(ranked, rows) if fate.status == FOUND]
    if not pairs:
        return []
    best, best_row = pairs[0]
    lines = []
    for key in compared:
        own = best.candidate.config[key]
        others = dict.fromkeys(str(fate.candidate.config[key]) for fate in ranked if str(fate.candidate.config[key]) != str(own))
        for value in others:
            rival = next((pair for pair in pairs if str(pair[0].candidate.config[key]) == value), None)
            if rival is not None:
                lines.append(_sentence(key, value, (best, best_row), rival))
            else:
                lines.append(_unmet(key, value, ranked, best))
    return lines


def _sentence(key: str, value: str, best: tuple[Fate, Mapping[str, Any]], rival: tuple[Fate, Mapping[str, Any]]) -> str:
    (winner, winner_row), (other, other_row) = best, rival
    more = other.cost / winner.cost - 1
    text = f"{key} {value}: {other_row['name']} at ${other.cost:,.2f} an hour, "
    text += f"{more:.0%} dearer than {winner_row['name']} at ${winner.cost:,.2f}" if more > 0.0005 else f"as dear as {winner_row['name']}"
    if key == "gpu" and more > 0.0005:
        price = other.candidate.usd_per_replica_h / other.candidate.gpus_per_replica
        text += f"; it breaks even at ${price / (1 + more):,.2f} a GPU hour instead of ${price:,.2f}"
    elif key == "tensor_parallel":
        text += _pool_words(winner, other)
    elif more > 0.0005:
        text += f"; it would have to serve the load with {winner.cost / other.cost:.0%} of its GPUs to break even"
    return text + "."


def _pool_words(winner: Fate, other: Fate) -> str:
    """KV tokens per GPU: a second copy of the weights is paid from the pool."""
    a, b = (fate.candidate.kv_tokens / fate.candidate.gpus_per_replica for fate in (winner, other))
    degree = winner.candidate.config["tensor_parallel"]
    sharing = "every GPU keeps" if degree == 1 else f"every {degree} GPUs share"
    return f"; a GPU holds {b:,.0f} KV tokens against {a:,.0f} at TP {degree}, where {sharing} a copy of the weights"


def _unmet(key: str, value: str, ranked: Sequence[Fate], best: Fate) -> str:
    mine = [fate for fate in ranked if str(fate.candidate.config[key]) == value]
    open_ones = [fate.cost for fate in mine if fate.status not in ("refused", "infeasible", "failed")]
    if open_ones:
        return f"{key} {value}: at least ${min(open_ones):,.2f} an hour, {min(open_ones) / best.cost - 1:.0%} above the cheapest."
    return f"{key} {value}: no fleet within the limits ({mine[0].limit})."
