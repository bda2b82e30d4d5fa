"""Batches built by shared prefix: children wait for their parent, the most shared first, nobody is passed for ever."""

from __future__ import annotations

from serving.kv_pool import KVPool
from serving.plan import StepResult
from serving.policies import Limits, Policies, load
from serving.request import Request
from serving.scheduler import Scheduler


def scheduler(blocks=200, max_batch_tokens=64, **options):
    policies = Policies(
        ordering=load("ordering", "fcfs"), batching=load("batching", "prefix_sharing", options), window=load("window", "none"),
        victim=load("preemption", "latest"), admission=load("admission", "always"), limits=Limits(max_batch_tokens, 8),
    )  # fmt: skip
    return Scheduler(KVPool(blocks, 16), policies)


def ask(sched, request_id, keys, tokens=None):
    prompt = tokens or 16 * len(keys) + 8
    return sched.submit(Request(request_id, float(request_id), prompt, 4, prefix_hashes=tuple(keys)), 0.0)


def step(sched, now_s, finish=()):
    plan = sched.schedule(now_s)
    chunks = [(seq.request_id, new) for seq, (new, _) in zip(plan.prefills, plan.chunks)]
    sched.commit(plan, StepResult(now_s + 1, [(seq, "length") for seq in finish]))
    sched.check()
    return chunks


def test_a_child_waits_for_its_parent_and_shares_its_blocks():
    sched = scheduler()
    shared = [("doc", i) for i in range(3)]
    ask(sched, 1, shared)
    ask(sched, 2, shared)
    ask(sched, 3, [("other", 0)])
    assert step(sched, 0.0) == [(1, 56), (3, 8)]  # 2 would compute the document again; 3 takes the rest of the budget
    assert step(sched, 1.0) == [(3, 16), (2, 8)]  # of its 56 tokens 48 are there by now


def test_those_that_share_most_with_what_runs_go_first():
    sched = scheduler()
    ask(sched, 1, [("a", i) for i in range(3)])
    step(sched, 0.0)
    ask(sched, 2, [("b", 0), ("b", 1)])
    ask(sched, 3, [("a", 0), ("a", 1)], tokens=64)
    ask(sched, 4, [("a", i) for i in range(3)])
    assert [request_id for request_id, _ in step(sched, 1.0)] == [4, 3, 2]


def test_nobody_is_passed_more_often_than_allowed():
    sched = scheduler(max_batch_tokens=40, max_bypasses=3)
    first = ask(sched, 0, [("a", i) for i in range(2)])
    step(sched, 0.0)
    cold = ask(sched, 1, [("cold", 0), ("cold", 1)])
    for number in range(2, 12):
        ask(sched, number, [("a", 0), ("a", 1)], tokens=64)
    order, now_s = [], 1.0
    while cold.scheduled_s != cold.scheduled_s:
        order += [request_id for request_id, _ in step(sched, now_s)]
        now_s += 1.0
    assert cold.bypasses == 3 and order.index(1) <= 5
    assert first.request_id == 0


def test_requests_without_known_content_keep_the_order_of_the_queue():
    sched = scheduler(max_batch_tokens=64)
    for number in range(4):
        sched.submit(Request(number, float(number), 32, 4), 0.0)
    assert [request_id for request_id, _ in step(sched, 0.0)] == [0, 1]
    assert [request_id for request_id, _ in step(sched, 1.0)] == [2, 3]
