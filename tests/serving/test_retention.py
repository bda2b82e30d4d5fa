"""Pages that running sequences give back: which go, what the pool and the attention's bill say, when entropy cuts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import InputError
from serving.kv_pool import KVPool
from serving.plan import StepResult
from serving.policies import Limits, Policies, load
from serving.policies.retention.entropy import Entropy
from serving.policies.retention.window import Window
from serving.request import Request
from serving.scenario import load as load_scenario
from serving.scheduler import Scheduler
from sim.run import simulate

WIDTH = 4


def scheduler(policy: object, *, blocks: int = 60, tokens: int = 64, named: bool = False) -> Scheduler:
    kinds = {"ordering": "fcfs", "batching": "chunked_prefill", "window": "none", "preemption": "latest", "admission": "fits"}
    parts = [load(kind, name) for kind, name in kinds.items()]
    policies = Policies(*parts, Limits(tokens, 8), speculation=load("speculation", "none"), retention=policy)
    return Scheduler(KVPool(blocks, WIDTH, prefix_caching=False, named=named), policies)


def step(queue: Scheduler, entropy: float | None = None, finish: tuple[int, ...] = ()):
    plan = queue.schedule(0.0)
    ended = [(seq, "stop") for seq in queue.live() if seq.request_id in finish]
    drawn = None if entropy is None else dict.fromkeys(plan.speculating, entropy)
    queue.commit(plan, StepResult(0.0, ended, dict.fromkeys(plan.speculating, 1), drawn))
    queue.check()
    return plan


def test_a_window_keeps_the_first_the_latest_and_the_hottest():
    policy = Window(window_blocks=3, sink_blocks=1, hot_blocks=2)
    assert list(policy.drop(6, 0, None)) == []
    assert list(policy.drop(8, 0, None)) == [1, 2]
    assert list(policy.drop(8, 0, [9, 5, 1, 4, 2, 0, 0, 0])) == [2, 4]


def test_a_long_prompt_holds_its_window_and_pays_for_no_more():
    queue = scheduler(Window(window_blocks=4, sink_blocks=1), tokens=16)
    queue.submit(Request(0, 0.0, 100, 50), 0.0)
    contexts = [step(queue).chunks[0] for _ in range(7)]
    assert contexts[:3] == [(16, 0), (16, 16), (16, 20)], "20 tokens are kept: a page of sinks and four of the window"
    (seq,) = queue.live()
    for _ in range(20):
        plan = step(queue)
        held = queue.pool.total - queue.pool.free
        assert held <= 6
        assert plan.decode_context_tokens <= 5 * WIDTH + WIDTH
    assert seq.computed == 120 and seq.dropped == 30 - 5


def test_a_prompt_longer_than_the_pool_is_served_where_its_window_fits():
    queue = scheduler(Window(window_blocks=4, sink_blocks=1), blocks=21, tokens=16)
    queue.submit(Request(0, 0.0, 70, 500), 0.0)
    for _ in range(100):
        assert step(queue).preempted == ()
    assert queue.running.count == 1


def test_entropy_cuts_after_so_many_calm_steps_in_a_row_and_not_before():
    queue = scheduler(Entropy(threshold=0.15, steps=3, window_blocks=2, sink_blocks=1))
    queue.submit(Request(0, 0.0, 40, 50), 0.0)
    step(queue)
    (seq,) = queue.live()
    for value in (0.1, 0.1, 0.2, 0.1, 0.1):
        step(queue, value)
    assert seq.dropped == 0
    step(queue, 0.1)
    assert seq.dropped == 12 - 3 and queue.dropped_blocks == 9
    step(queue, 0.5)
    assert seq.calm_steps == 0


def test_the_page_being_written_cannot_go():
    class Greedy:
        most_blocks, entropy_below = None, 0.0

        def drop(self, held, calm_steps, heat):
            return range(held)

    queue = scheduler(Greedy())
    queue.submit(Request(0, 0.0, 10, 5), 0.0)
    with pytest.raises(ValueError, match="Greedy drops page"):
        step(queue)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(1, 6), st.integers(0, 2), st.integers(0, 3), st.integers(20, 60),
)  # fmt: skip
def test_pages_are_conserved_named_once_and_all_come_back(jobs, window, sink, hot, blocks):
    queue = scheduler(Window(window_blocks=window, sink_blocks=sink, hot_blocks=hot), blocks=blocks, named=True)
    left = {}
    for index, (prompt, output) in enumerate(jobs):
        if isinstance(queue.submit(Request(index, 0.0, prompt, output), 0.0), str):
            continue
        left[index] = output
    for _ in range(2000):
        if not queue.has_work:
            break
        plan = queue.schedule(0.0)
        for seq in queue.running:
            queue.pool.name_blocks(seq, seq.computed)
        for seq in [*plan.speculating, *plan.completing]:
            left[seq.request_id] -= 1
        ended = [(seq, "length") for seq in queue.running if left[seq.request_id] <= 0]
        queue.commit(plan, StepResult(0.0, ended, dict.fromkeys(plan.speculating, 1)))
        queue.check()
        tables = [block for seq in queue.running for block in seq.table or ()]
        assert len(tables) == len(set(tables)) and 0 not in tables
        assert all(len(seq.table or ()) <= queue.pool.blocks_for(seq.computed) - seq.dropped for seq in queue.running)
    assert not queue.has_work and queue.pool.free == queue.pool.total


def run(*overrides: str) -> dict:
    return simulate(load_scenario("long-context", ["workload.requests=40", *overrides]), saturated_rps=1.0).summary


def test_a_window_shortens_steps_and_frees_the_pool_and_entropy_lies_between():
    window, everything, entropy = run(), run("retention=null"), run("retention.policy=entropy")
    assert window["tpot_s"]["mean"] < entropy["tpot_s"]["mean"] < everything["tpot_s"]["mean"]
    assert window["kv_utilisation"]["mean"] < entropy["kv_utilisation"]["mean"] < everything["kv_utilisation"]["mean"]


def test_keeping_everything_by_policy_is_keeping_everything():
    kept = run("retention.policy={name: window, window_blocks: 100000}")
    plain = run("retention=null")
    for key in ("ttft_s", "tpot_s", "itl_s", "steps", "kv_utilisation"):
        assert kept[key] == plain[key], key


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ("kv_cache.prefix_caching=true", "prefix_caching"),
        ("policy.batching.max_in_flight=2", "max_in_flight"),
        ("retention.policy={name: window, window_blocks: 0}", "window_blocks"),
        ("retention.policy={name: entropy, threshold: 1.5}", "threshold"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(InputError, match=match):
        run(overrides)
