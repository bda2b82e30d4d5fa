"""Does a fleet attain its objectives? Intervals over requests and over replications, and the decision they allow.

Two intervals are made and the wider one counts. Wilson's (E. B. Wilson, JASA 22, 1927) takes every request as an independent
trial: it knows how few requests there were, and nothing of the queue that makes their fates alike. Student's over replications
knows the queue, and nothing of how few misses it saw. Levels are one-sided: "at 95 %" means that the lower end is above the
target with that confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

FEASIBLE, INFEASIBLE, OPEN = "feasible", "infeasible", "open"
_CLEARLY = 2.0  # times the misses that are allowed: from here on one replication is enough to refuse


class Interval(NamedTuple):
    """A share with the ends of its one-sided intervals."""

    estimate: float
    low: float
    high: float


def t_reach(values: Sequence[float], level: float) -> float:
    """Half width of Student's interval of the mean of at least two values at the one-sided ``level``."""
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return float(stdtrit(n - 1, level)) * math.sqrt(variance / n)


def wilson(met: int, measured: int, level: float) -> tuple[float, float]:
    """Ends of Wilson's score intervals of a share, each one-sided at ``level``; (0, 1) where nothing was measured."""
    from scipy.special import ndtri

    if not measured:
        return 0.0, 1.0
    z = float(ndtri(level))
    share, weight = met / measured, z * z / measured
    middle = (share + weight / 2) / (1 + weight)
    reach = z / (1 + weight) * math.sqrt(share * (1 - share) / measured + weight / (4 * measured))
    return max(0.0, middle - reach), min(1.0, middle + reach)


def attainment(replications: Sequence[tuple[int, int]], level: float) -> Interval:
    """Interval of the attained share from (met, measured) of each replication: the wider of Wilson's and Student's."""
    met, measured = (sum(counts) for counts in zip(*replications))
    low, high = wilson(met, measured, level)
    estimate = met / measured if measured else 1.0
    shares = [m / n for m, n in replications if n]
    if len(shares) > 1:
        reach = t_reach(shares, level)
        low, high = min(low, estimate - reach), max(high, estimate + reach)
    return Interval(estimate, max(0.0, low), min(1.0, high))


def decide(replications: Sequence[dict[str, tuple[int, int]]], target: float, level: float, *, exact: bool, minimum: int) -> str:
    """The verdict on (met, measured) by class of each replication: every class must attain ``target``.

    ``exact``: the workload is a recorded one, there is nothing to sample, and the shares themselves decide.
    """
    classes = [name for name in replications[0] if any(each[name][1] for each in replications)]
    intervals = {name: attainment([each[name] for each in replications], level) for name in classes}
    if exact:
        return FEASIBLE if all(each.estimate >= target for each in intervals.values()) else INFEASIBLE
    if len(replications) < minimum:
        return OPEN
    if any(each.high < target for each in intervals.values()):
        return INFEASIBLE
    return FEASIBLE if all(each.low >= target for each in intervals.values()) else OPEN


def refuted(missed: int, total: int, target: float, level: float, *, exact: bool) -> bool:
    """Whether ``missed`` of ``total`` requests, of whom the rest may all be met, refuse a fleet before its run has ended.

    For a recorded workload when more were missed than are allowed. Else when they are twice as many, and too many for chance
    (Wilson) as well: one replication must not refuse what the next would allow.
    """
    allowed = (1 - target) * total
    if exact:
        return missed > allowed + 1e-9
    return missed > _CLEARLY * allowed and wilson(total - missed, total, level)[1] < target
