"""Max-min fair rates by progressive filling: all rates grow together until a channel is full or a demand has its cap.

The result is the one allocation in which no rate can grow without taking from a rate that is not larger (Bertsekas and
Gallager, *Data Networks*, 6.5.2). Demands are groups of like flows, so the cost grows with groups, not with flows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol


class Demand(Protocol):
    """``count`` like flows, each of which takes ``times`` its rate from every channel in ``uses`` and at most ``cap`` bytes/s."""

    count: int
    cap: float
    priority: int
    uses: tuple[tuple[int, int], ...]  # (channel index, times)


def max_min_rates(demands: Sequence[Demand], capacity: Mapping[int, float]) -> list[float]:
    """Return the rate in bytes/s of one flow of each demand.

    ``capacity`` gives bytes/s by channel; a channel that is missing never binds. A smaller ``priority`` is served first, and
    a later class shares what is left. The cost is near-linear in the sum of the demands' path lengths.
    """
    if len(demands) == 1:
        only = demands[0]
        return [min([only.cap] + [capacity[c] / (only.count * times) for c, times in only.uses if c in capacity])]
    rates = [0.0] * len(demands)
    left = dict(capacity)
    for priority in sorted({demand.priority for demand in demands}):
        _fill(demands, [i for i, demand in enumerate(demands) if demand.priority == priority], left, rates)
    return rates


def _fill(demands: Sequence[Demand], level: list[int], left: dict[int, float], rates: list[float]) -> None:
    """Fill one priority class and take its use from ``left``."""
    weight: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for i in level:
        for channel, times in demands[i].uses:
            if channel in left:
                weight[channel] = weight.get(channel, 0) + times * demands[i].count
                members.setdefault(channel, []).append(i)
    fullest = [(left[channel] / n, channel) for channel, n in weight.items()]
    heapq.heapify(fullest)
    by_cap = sorted(level, key=lambda i: (demands[i].cap, i))
    is_open = dict.fromkeys(level, True)

    def freeze(i: int, rate: float) -> None:
        is_open[i] = False
        rates[i] = rate
        for channel, times in demands[i].uses:
            if channel in left:
                used = times * demands[i].count
                left[channel] = max(0.0, left[channel] - used * rate)
                weight[channel] -= used

    for i in by_cap:  # every pass ends with i frozen: at its cap, or with a channel that fills up first
        while is_open[i] and fullest and fullest[0][0] < demands[i].cap:
            share, channel = fullest[0]
            if weight[channel] == 0:
                heapq.heappop(fullest)
                continue
            current = left[channel] / weight[channel]
            if current > share:  # shares only grow as demands freeze below them, so a stale entry is a lower bound
                heapq.heapreplace(fullest, (current, channel))
                continue
            heapq.heappop(fullest)
            for j in members[channel]:
                if is_open[j]:
                    freeze(j, current)
        if is_open[i]:
            freeze(i, demands[i].cap)
