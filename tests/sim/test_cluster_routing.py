"""Routing: what each policy does with the signals it has, and what stale signals do to it."""

from __future__ import annotations

import numpy as np
import pytest
from drivers import Case, Linear, request, serve

from serving.errors import IllegalAnswerError
from serving.policies import load
from serving.request import Arrival

SLOW = Linear(0.05, 1e-4, 0.0, 0.0)


class Fleet:
    """What a router sees."""

    def __init__(self, tokens: list[int], off: tuple[int, ...] = ()) -> None:
        self.now_s, self.outstanding_tokens, self._off = 0.0, tokens, off

    def least_outstanding(self) -> int:
        return self.outstanding_tokens.index(min(self.outstanding_tokens))

    def online(self, replica: int) -> bool:
        return replica not in self._off


def test_round_robin_takes_turns():
    policy = load("routing", "round_robin")
    assert [policy.route(request(i), Fleet([5, 0, 0])) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_outstanding_takes_the_least_and_the_first_among_equals():
    policy = load("routing", "least_outstanding_tokens")
    assert policy.route(request(0), Fleet([3, 1, 1])) == 1


def family(name: str, blocks: int = 16) -> tuple:
    """Keys of a shared prefix."""
    return tuple((name, i) for i in range(blocks))


def test_prefix_affinity_returns_until_load_outweighs_the_prefix():
    policy = load("routing", "prefix_affinity", {"load_weight": 0.5})
    prompt = {"prompt": 256, "prefix_hashes": family("a")}
    assert policy.route(request(0, **prompt), Fleet([9, 0, 0])) == 1
    assert policy.route(request(1, **prompt), Fleet([0, 400, 0])) == 1, "256 cached tokens against half of 400"
    assert policy.route(request(2, **prompt), Fleet([0, 600, 0])) == 0, "spreads to a second replica"
    assert policy.route(request(3, **prompt), Fleet([100, 120, 0])) == 0, "both have it now: the less loaded of the two"
    assert policy.route(request(4, prompt=256), Fleet([7, 7, 0])) == 2, "nothing to share: the least loaded"


def test_prefix_affinity_forgets_what_it_served_longest_ago():
    policy = load("routing", "prefix_affinity", {"memory_keys": 2, "stride_blocks": 8})
    assert policy.route(request(0, prompt=256, prefix_hashes=family("a")), Fleet([9, 0])) == 1
    assert policy.route(request(1, prompt=256, prefix_hashes=family("b")), Fleet([0, 9])) == 0
    assert policy.route(request(2, prompt=256, prefix_hashes=family("a")), Fleet([3, 9])) == 0, "a is forgotten: the less loaded"
    assert policy.route(request(3, prompt=256, prefix_hashes=family("a")), Fleet([9, 3])) == 0, "it is known to be here now"


def test_prefix_affinity_spreads_new_prefixes_over_idle_replicas():
    policy = load("routing", "prefix_affinity")
    chosen = [policy.route(request(i, prompt=256, prefix_hashes=family(str(i))), Fleet([0, 0, 0])) for i in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def burst(count: int, every_s: float, prompt: int = 64) -> list[Arrival]:
    """Equal requests at equal distances."""
    return [Arrival(request(i, 0.001 + every_s * i, prompt), 8) for i in range(count)]


def replicas_of(case: Case, arrivals: list[Arrival]) -> np.ndarray:
    """The replica of each request."""
    return serve(case, arrivals).columns["replica"]


def test_fresh_signals_spread_a_burst_evenly():
    case = Case(blocks=200, replicas=4, latency=SLOW).with_policy("routing", "least_outstanding_tokens")
    assert np.bincount(replicas_of(case, burst(40, 0.001)), minlength=4).tolist() == [10] * 4


def test_stale_signals_send_the_herd_away_from_whoever_is_free():
    """Replica 0 has long finished its large prompt, but looks busy until the next reading: all that arrives goes to the others."""
    arrivals = [Arrival(request(0, 0.01, 1000), 1)]
    arrivals += [Arrival(request(i, 0.02 * i + 0.005, 10), 1) for i in range(1, 60)]
    case = Case(blocks=200, replicas=2, max_batch_tokens=2048, latency=Linear(0.01, 0.0, 0.0, 0.0))
    stale = replicas_of(case.with_policy("routing", "least_outstanding_tokens", signal_age_s=1.0), arrivals)
    assert stale[1:50].tolist() == [1] * 49, "one second of traffic"
    assert stale[50] == 0 and set(stale[50:].tolist()) == {0, 1}
    fresh = replicas_of(case.with_policy("routing", "least_outstanding_tokens"), arrivals)
    assert fresh[1:].tolist() == [0] * 59


def test_stale_signals_cost_latency():
    rng = np.random.default_rng(6)
    at_s = np.cumsum(rng.exponential(0.02, 1500))
    arrivals = [Arrival(request(i, t, int(rng.integers(16, 256))), int(rng.integers(1, 30))) for i, t in enumerate(at_s.tolist())]
    ttft_s = {}
    for age_s in (0.0, 20.0):
        case = Case(blocks=120, max_batch_seqs=4, replicas=4, latency=Linear(0.012, 1e-4, 0.0, 0.0))
        case = case.with_policy("routing", "least_outstanding_tokens", signal_age_s=age_s)
        ttft_s[age_s] = serve(case, arrivals, record=False).summary["ttft_s"]["mean"]
    assert ttft_s[0.0] < 0.95 * ttft_s[20.0]


def test_a_reading_holds_until_the_next_one():
    """Replica 0 is done with its request at once, but the router learns of it at 1.0 s; what it sent itself it knows."""
    case = Case(blocks=200, replicas=2, latency=Linear(0.01, 0.0, 0.0, 0.0))
    at_s = (0.1, 0.5, 0.6, 0.97, 1.0, 1.005)
    prompts = (100, 60, 30, 5, 90, 10)
    arrivals = [Arrival(request(i, t, n), 1) for i, (t, n) in enumerate(zip(at_s, prompts))]
    stale = case.with_policy("routing", "least_outstanding_tokens", signal_age_s=1.0)
    assert replicas_of(stale, arrivals).tolist() == [0, 1, 1, 1, 0, 1]
    fresh = case.with_policy("routing", "least_outstanding_tokens")
    assert replicas_of(fresh, arrivals).tolist() == [0, 0, 0, 0, 0, 1]


class Watcher:
    """Sends everything to replica 0 and notes what it could have known of it."""

    needs_load = needs_queues = True
    signal_age_s = 0.0

    def __init__(self, *, seen: list) -> None:
        self._seen = seen

    def route(self, request, fleet) -> int:
        self._seen.append((fleet.waiting(0), round(fleet.kv_use(0), 4), fleet.cached_blocks(0, request.prefix_hashes)))
        return 0


def test_queues_are_seen_as_of_the_last_step_and_caches_as_they_are():
    """Steps of a second, one sequence at a time, pages of 16: what comes during a step is seen when that step has ended."""
    seen: list[tuple[int, float, int]] = []
    arrivals = [Arrival(request(i, t, 32, prefix_hashes=(("a", 0), ("a", 1))), 2) for i, t in enumerate((0.0, 0.1, 0.2, 1.1, 2.1, 12.0))]
    case = Case(blocks=101, replicas=2, max_batch_seqs=1, latency=Linear(1.0, 0.0, 0.0, 0.0))
    serve(case.with_policy("routing", Watcher, seen=seen), arrivals)
    first_step = (0, 0.0, 0)  # idle at 0.0; at 0.1 and 0.2 it has not told of the step it is in
    assert seen[:3] == [first_step] * 3
    assert seen[3] == (2, 0.03, 2), "after the prompt's step: two wait, three of 100 pages held, both full ones cached"
    assert seen[4][0] == 2, "the first one has left, the second one is served, two wait"
    assert seen[5] == (0, 0.0, 2), "all served: nothing held, the prefix still there"


def test_prefix_affinity_raises_the_hit_rate():
    rng = np.random.default_rng(3)
    at_s = np.cumsum(rng.exponential(0.05, 400)).tolist()
    arrivals = [
        Arrival(request(i, t, 272, prefix_hashes=(*family(str(rng.integers(12)), 14), ("own", i, 0), ("own", i, 1))), 4) for i, t in enumerate(at_s)
    ]
    case = Case(blocks=120, replicas=4, max_batch_tokens=1024, latency=Linear(0.005, 1e-5, 0.0, 0.0))
    rates = [
        serve(case.with_policy("routing", name, **options), arrivals, record=False).summary["prefix_cache_hit_rate"]
        for name, options in (("round_robin", {}), ("prefix_affinity", {"stride_blocks": 7}))
    ]
    assert rates[1] > rates[0] + 0.2


def test_a_router_that_names_no_replica_is_named():
    class Nowhere:
        def route(self, request, fleet):
            return 5

    case = Case(replicas=2).with_policy("routing", Nowhere)
    with pytest.raises(IllegalAnswerError, match="Nowhere chose replica 5 of 2"):
        serve(case, burst(1, 1.0))
