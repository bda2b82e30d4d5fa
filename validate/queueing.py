"""Closed forms of simple queues: what a simulated station must reproduce within its confidence interval.

Rates are per second, times in seconds. Sources: L. Kleinrock, Queueing Systems I (1975), sections 3.2 (M/M/1), 3.5 (M/M/c)
and 5.6 (Pollaczek-Khinchine); J. Little, Operations Research 9 (1961) for L = lambda W.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Station(NamedTuple):
    """Long-run means of one queueing station. ``rho`` is the load per server, the numbers count requests."""

    rho: float
    wait_s: float
    sojourn_s: float
    waiting: float
    present: float


def _station(arrival_rps: float, service_s: float, wait_s: float, servers: int = 1) -> Station:
    sojourn_s = wait_s + service_s
    return Station(arrival_rps * service_s / servers, wait_s, sojourn_s, arrival_rps * wait_s, arrival_rps * sojourn_s)


def _stable_load(arrival_rps: float, service_s: float, servers: int = 1) -> float:
    if arrival_rps < 0 or service_s <= 0 or servers < 1:
        raise ValueError("a station needs a rate >= 0, a service time > 0 and at least one server")
    rho = arrival_rps * service_s / servers
    if rho >= 1:
        raise ValueError(f"load {rho:.3g} is at or above one: the queue has no steady state")
    return rho


def mg1(arrival_rps: float, service_s: float, service_cv2: float) -> Station:
    """Poisson arrivals, one server, any service time of squared coefficient of variation ``service_cv2``.

    Pollaczek-Khinchine: wait = rho / (1 - rho) * (1 + cv^2) / 2 * service. Raises ValueError at a load of one or more.
    """
    rho = _stable_load(arrival_rps, service_s)
    return _station(arrival_rps, service_s, rho / (1 - rho) * (1 + service_cv2) / 2 * service_s)


def mm1(arrival_rps: float, service_s: float) -> Station:
    """Poisson arrivals, one server, exponential service of mean ``service_s``."""
    return mg1(arrival_rps, service_s, 1.0)


def md1(arrival_rps: float, service_s: float) -> Station:
    """Poisson arrivals, one server, every service exactly ``service_s``."""
    return mg1(arrival_rps, service_s, 0.0)


def mmc(arrival_rps: float, service_s: float, servers: int) -> Station:
    """Poisson arrivals, ``servers`` equal servers, exponential service: the Erlang C formula."""
    rho = _stable_load(arrival_rps, service_s, servers)
    offered = arrival_rps * service_s
    blocking = 1.0
    for n in range(1, servers + 1):  # Erlang B by its recurrence: factorials would overflow at a few hundred servers
        blocking = offered * blocking / (n + offered * blocking)
    waits = blocking / (1 - rho * (1 - blocking))
    return _station(arrival_rps, service_s, waits * service_s / (servers * (1 - rho)), servers)


def mm1_sojourn_quantile(arrival_rps: float, service_s: float, quantile: float) -> float:
    """Seconds that a fraction ``quantile`` of the requests of an M/M/1 queue stay below (its sojourn is exponential)."""
    return -math.log1p(-quantile) * mm1(arrival_rps, service_s).sojourn_s


def overload_mean_wait_s(requests: int, arrival_rps: float, service_rps: float) -> float:
    """Mean wait when ``requests`` come faster than they are served: the k-th waits k (1/mu - 1/lambda); zero below saturation."""
    return max(0.0, requests / 2 * (1 / service_rps - 1 / arrival_rps))


def littles_law_present(throughput_rps: float, mean_sojourn_s: float) -> float:
    """Mean number of requests present, from the rate that leaves and the mean time each stayed."""
    return throughput_rps * mean_sojourn_s
