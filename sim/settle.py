"""New rates after flows started or ended, touching no more groups than have to change.

The groups next to the change are solved with all others held fixed; then every group whose bottleneck may have gone must
still have one: its cap, or a full link on which no flow of its class is faster and no lower class moves at all. Groups
without one join, and the solution is repeated. When none is left, all groups have a bottleneck, and an allocation with
that property is *the* max-min fair one, so the result equals a full solution (a property test compares them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sim.fair_share import max_min_rates
from sim.flows import Group, Load, Peaks

_TIE = 1 + 1e-9  # rates this close count as equal
_PATIENCE = 8  # rounds of growth before the whole connected component is solved at once


def settle(changed: Iterable[Group], touched: Iterable[Load], loads: Mapping[int, Load]) -> dict[Group, float]:
    """Return new rates for ``changed`` and for every group their change reaches, and note on each link whether it is full.

    ``touched`` are the links that could bind before the change or can now; ``load.peaks`` must be right for the rates before it.
    """
    free = dict.fromkeys(changed)
    for load in touched:
        if load.peaks is not None:
            free.update(dict.fromkeys(load.groups))
        if not load.binding:
            load.peaks = None
    for round_number in range(_PATIENCE + 1):
        if round_number == _PATIENCE:
            free = _component(free, loads)
        ordered = sorted(free, key=_number)
        near = {index: loads[index] for group in ordered for index, _ in group.uses if loads[index].binding}
        rates = dict(zip(ordered, max_min_rates(ordered, {index: _left(load, free) for index, load in near.items()})))
        peaks = {index: _peaks(load, rates) for index, load in near.items()}
        joining = _joining(rates, near, peaks, loads)
        if not joining:
            break
        free.update(joining)
    for group in ordered:
        for index, _ in group.uses:
            loads[index].peaks = peaks.get(index)
    return rates


def _left(load: Load, free: Mapping[Group, None]) -> float:
    """Bytes per second of ``load`` that the groups held fixed leave over."""
    return max(0.0, load.capacity - sum(times * group.count * group.rate for group, times in load.groups.items() if group not in free))


def _peaks(load: Load, rates: Mapping[Group, float]) -> Peaks | None:
    """The highest rate in each class on a full link; None when the link is not full."""
    used = 0.0
    peaks: Peaks = {}
    for group, times in load.groups.items():
        rate = rates.get(group, group.rate)
        used += times * group.count * rate
        if rate > peaks.get(group.priority, -1.0):
            peaks[group.priority] = rate
    return peaks if used * _TIE >= load.capacity else None


def _joining(
    rates: Mapping[Group, float], near: Mapping[int, Load], peaks: Mapping[int, Peaks | None], loads: Mapping[int, Load]
) -> dict[Group, None]:
    """Groups held fixed that must join: those that lost their bottleneck, and those that deprive a free group of its own."""
    joining: dict[Group, None] = {}

    def has_bottleneck(group: Group, rate: float) -> bool:
        return rate * _TIE >= group.cap or any(_bottleneck(peaks[i] if i in near else loads[i].peaks, group, rate) for i, _ in group.uses)

    for load in near.values():
        if load.peaks is not None:  # full until now: it may have been the bottleneck of any group on it
            joining.update(dict.fromkeys(group for group in load.groups if group not in rates and not has_bottleneck(group, group.rate)))
    for group, rate in rates.items():
        if not has_bottleneck(group, rate):
            for index, _ in group.uses:
                if index in near:
                    joining.update(
                        dict.fromkeys(other for other in near[index].groups if other not in rates and _exceeds(other, group, rate))
                    )
    return joining


def _bottleneck(peaks: Peaks | None, group: Group, rate: float) -> bool:
    if peaks is None or peaks[group.priority] > rate * _TIE:
        return False
    return len(peaks) == 1 or all(other_rate == 0 for priority, other_rate in peaks.items() if priority > group.priority)


def _exceeds(other: Group, group: Group, rate: float) -> bool:
    return other.rate > 0 if other.priority > group.priority else other.priority == group.priority and other.rate > rate * _TIE


def _component(start: Iterable[Group], loads: Mapping[int, Load]) -> dict[Group, None]:
    """All groups reachable over links that can bind."""
    found = dict.fromkeys(start)
    pending = list(found)
    seen: set[int] = set()
    while pending:
        for index, _ in pending.pop().uses:
            if index not in seen and loads[index].binding:
                seen.add(index)
                fresh = [group for group in loads[index].groups if group not in found]
                found.update(dict.fromkeys(fresh))
                pending.extend(fresh)
    return found


def _number(group: Group) -> int:
    return group.number
