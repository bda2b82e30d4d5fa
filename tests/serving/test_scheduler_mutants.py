"""Small faults, planted one by one, must each be caught by the check named beside it: else that check holds nothing.

A mutant replaces a piece of one function's text. Where the text has changed, the mutant has to be written anew.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import test_scheduler_cases as cases
from drivers import Case, random_aborts, random_arrivals, random_case, request, serve
from stepper import Stepper
from test_kv_pool import NamedPoolsAgree, PoolsAgree, walk
from test_scheduler_invariants import assert_conserved, bound_on_steps, consistent

from serving.builder import PlanBuilder
from serving.kv_pool import KVPool
from serving.policies.batching.chunked_prefill import ChunkedPrefill
from serving.policies.ordering.fcfs import Fcfs
from serving.policies.ordering.priority import Priority
from serving.request import Arrival
from serving.running import Running
from serving.scheduler import Scheduler
from sim.cluster import Cluster
from sim.oracle import Oracle
from sim.replica import Replica

SEEDS = range(12)
RECORDED: dict[int, list[dict]] = {}


# -- the checks -----------------------------------------------------------------------------------------------------------


def by_invariants() -> None:
    """Conservation, causality, budgets, and what ``check`` sees, after every step."""
    for seed in SEEDS:
        case = random_case(seed)
        arrivals = random_arrivals(seed, case)
        stepper = Stepper(case).run(arrivals, random_aborts(seed, arrivals), bound_on_steps(case, arrivals))
        assert_conserved(stepper, arrivals)


def by_reference_pool() -> None:
    """The independent per-block pool."""
    for machine in (PoolsAgree, NamedPoolsAgree):
        for seed in range(30):
            walk(machine, seed)


def by_stepwise() -> None:
    """Fast, woken and stepwise runs agree."""
    for seed in SEEDS:
        case = random_case(seed, replicas=1 + seed % 2)
        arrivals = random_arrivals(seed, case)
        fast = serve(case, arrivals).comparable()
        assert fast == serve(case, arrivals, stepwise=True).comparable()
        assert fast == serve(case, arrivals, watch=lambda *outcome: None).comparable()


def by_replay() -> None:
    """The decisions are those that were recorded, plan by plan."""
    for seed in SEEDS:
        assert recorded(seed) == RECORDED[seed]


def by_case_s2() -> None:
    """A sequence at the wall of the pool ends without evicting itself first."""
    cases.test_s2_a_sequence_at_the_wall_of_the_pool_ends_cleanly("chunked_prefill", 24)


def by_content() -> None:
    """Every block that is read holds what was written for it."""
    for seed in SEEDS:
        case = replace(random_case(seed), block_tokens=4, blocks=30, prefix_caching=True)
        arrivals = [arrival for arrival in random_arrivals(seed, case, requests=30) if consistent(arrival)]
        Stepper(case, memory=True).run(arrivals)


def recorded(seed: int) -> list[dict]:
    """Decisions of a random run, and of a burst at one instant, where ties decide."""
    case = random_case(seed)
    arrivals = random_arrivals(seed, case)
    burst = [Arrival(request(i, 0.5, 10 + 7 * (i % 5)), 5) for i in (3, 1, 4, 0, 5, 2)]
    return [serve(case, arrivals, aborts=random_aborts(seed, arrivals)).decisions, serve(Case(max_batch_seqs=2), burst).decisions]


@pytest.fixture(scope="module", autouse=True)
def unharmed():
    """Decisions of the scheduler as it is."""
    RECORDED.update({seed: recorded(seed) for seed in SEEDS})
    yield
    RECORDED.clear()


# -- the faults -----------------------------------------------------------------------------------------------------------

MUTANTS = [
    (by_replay, Fcfs, "key", "request.request_id)", "-request.request_id)"),
    (by_replay, Priority, "key", "(request.priority, ", "(-request.priority, "),
    (by_replay, Running, "latest", "seq.admission_index >", "seq.admission_index <"),
    (by_replay, KVPool, "blocks_for", "-(-tokens // self.block_tokens)", "tokens // self.block_tokens + 1"),
    (by_replay, KVPool, "match", "blocks < limit:", "blocks < limit - 1:"),
    (by_reference_pool, KVPool, "_evict", "extent.keys = extent.keys[: size - gone]", "extent.keys = extent.keys[gone:]"),
    (by_reference_pool, KVPool, "_evict", "next(iter(self._idle))", "next(reversed(self._idle))"),
    (by_reference_pool, KVPool, "_evict", "extent.ids[size - gone :]", "extent.ids[:gone]"),
    (by_reference_pool, KVPool, "publish", "            self.unused += common\n", ""),
    (by_reference_pool, KVPool, "publish", "            upper.references += 1\n", ""),
    (by_reference_pool, KVPool, "_reference", "            extent.references += 1\n", ""),
    (by_reference_pool, KVPool, "_append", "extent.references == 1 and not", "not"),
    (by_reference_pool, KVPool, "release", "reversed((seq.table or [])[seq.shared_blocks :])", "reversed(seq.table or [])"),
    (by_invariants, Scheduler, "_stop_decoding", "self.phases[(self.clock - seq.computed) % self.pool.block_tokens] -= 1", "pass"),
    (by_invariants, Scheduler, "_stop_decoding", "if seq.dropped else seq.computed", "if seq.dropped else seq.computed - 1"),
    (by_invariants, Scheduler, "join_decodes", "(clock - seq.computed) %", "(clock - seq.computed + 1) %"),
    (by_invariants, Scheduler, "preempt", "self.pool.release(seq)", "pass"),
    (by_invariants, Scheduler, "abort", "seq.generated -= undelivered", "pass"),
    (by_content, Scheduler, "_publish_all", "full = seq.computed //", "full = 1 + seq.computed //"),
    (by_invariants, PlanBuilder, "continue_decodes", "self.pool.take(need)", "self.pool.take(need + 1)"),
    (by_invariants, PlanBuilder, "continue_decodes", "if need > self.pool.free", "if need > self.pool.free + 1"),
    (by_invariants, PlanBuilder, "admit", "if need > pool.free", "if need > pool.free + 1"),
    (by_case_s2, PlanBuilder, "preempt", "not self._fits_alone(seq)", "False"),
    (by_invariants, Oracle, "finished", "seq.entry_clock + rest", "seq.entry_clock + rest + 1"),
    (by_stepwise, PlanBuilder, "finish", "plan.valid_until_s = -1.0", "pass"),
    (by_stepwise, Scheduler, "steps_possible", "return limit  #", "return limit + 0 if limit < 3 else limit + width  #"),
    (by_stepwise, Scheduler, "extend", "self.pool.take(blocks)", "self.pool.take(blocks - 1)"),
    (by_stepwise, Oracle, "steps_to_next_finish", "due[0][0] - clock", "due[0][0] - clock + 1"),
    (by_stepwise, Replica, "_catch_up", "bisect_left(self._ends, now_s) + 1", "bisect_left(self._ends, now_s) + 2"),
    (by_stepwise, Replica, "_price_steps", "keep = bisect_left(ends, plan.valid_until_s) + 1", "keep = len(ends)"),
    (by_stepwise, Cluster, "settle_signals", "self.env.now >= self._next_read_s", "False"),
    (by_stepwise, ChunkedPrefill, "plan", "change_s = min(change_s, open_s)", "pass"),
]  # fmt: skip


SOURCES = {(owner, name): textwrap.dedent(inspect.getsource(getattr(owner, name))) for _, owner, name, _, _ in MUTANTS}  # as imported


def mutate(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Replace ``old`` by ``new`` in the text of a method, for one test."""
    source = SOURCES[owner, name]
    found = textwrap.indent(textwrap.dedent(old), " " * (len(old) - len(old.lstrip(" ")) - 4)) if old.startswith(" ") else old
    assert found in source, f"this mutant no longer applies to {owner.__name__}.{name}: write it anew"
    namespace: dict[str, Any] = dict(vars(sys.modules[owner.__module__]))
    code = compile(source.replace(found, new), f"<mutant of {name}>", "exec", flags=annotations.compiler_flag)
    exec(code, namespace)
    monkeypatch.setattr(owner, name, namespace[name])


def is_caught(check: Callable[[], None]) -> bool:
    """Whether the check fails, by an assertion or because the mutant breaks down."""
    try:
        check()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("check", [by_invariants, by_reference_pool, by_stepwise, by_replay, by_content, by_case_s2])
def test_the_unharmed_scheduler_passes(check):
    check()


@pytest.mark.parametrize(("check", "owner", "name", "old", "new"), MUTANTS)
def test_a_mutant_is_caught(monkeypatch, check, owner, name, old, new):
    mutate(monkeypatch, owner, name, old, new)
    assert is_caught(check)


def test_a_policy_that_reads_a_clock_of_its_own_is_caught(monkeypatch):
    """Its decisions depend on how long the simulator took, so a replay finds other ones."""
    honest = ChunkedPrefill.plan

    def plan(self: ChunkedPrefill, batch: PlanBuilder) -> None:
        if batch.waiting and int(time.perf_counter() * 1e5) % 2 and batch.decodes:
            batch.continue_decodes()
        else:
            honest(self, batch)

    monkeypatch.setattr(ChunkedPrefill, "plan", plan)
    assert is_caught(by_replay) or is_caught(by_stepwise)
