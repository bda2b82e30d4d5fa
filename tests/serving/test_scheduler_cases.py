"""Cases from the field that a scheduler must get right: S1, S2, S4, S7, S9 and S11, each with its own numbers."""

from __future__ import annotations

import math

import pytest
from drivers import Case, Linear, request, serve
from stepper import Stepper

from serving.plan import StepResult
from serving.request import Arrival
from serving.sequence import DECODING


def test_s1_what_can_never_fit_is_refused_by_the_name_of_the_limit():
    case = Case(blocks=76_640 // 16 + 1, max_batch_tokens=2048, max_batch_seqs=64)
    arrivals = [Arrival(request(0, 0.0, 100_000, 262_144), 50)] + [Arrival(request(i, 0.0, 200), 20) for i in range(1, 11)]
    refused = {}
    served = serve(case, arrivals, watch=lambda request_id, time_s, status: refused.setdefault(request_id, (time_s, status)))
    assert refused[0] == (0.0, "rejected: kv_capacity")
    assert served.summary["requests"]["rejected"] == 1 and served.summary["requests"]["completed"] == 10
    assert served.columns["scheduled_s"][1:].max() == 0.0, "the queue behind it proceeds at once"


def test_s1_even_without_admission_control_the_queue_proceeds():
    case = Case(blocks=76_640 // 16 + 1, max_batch_tokens=2048, max_batch_seqs=64).with_policy("admission", "always")
    arrivals = [Arrival(request(0, 0.0, 100_000, 262_144), 50)] + [Arrival(request(i, 0.0, 200), 20) for i in range(1, 11)]
    served = serve(case, arrivals)
    assert served.summary["requests"] == {"arrived": 11, "completed": 10, "rejected": 0, "failed": 1, "preempted": 0}
    assert served.columns["scheduled_s"][1:].max() == 0.0


@pytest.mark.parametrize("batching", ["chunked_prefill", "prefill_first", "whole_prompt"])
@pytest.mark.parametrize("output", [8, 9, 10, 24])
def test_s2_a_sequence_at_the_wall_of_the_pool_ends_cleanly(batching, output):
    case = Case(blocks=64, block_tokens=16, max_batch_tokens=2048).with_policy("batching", batching)
    stepper = Stepper(case).run([Arrival(request(0, 0.0, 1000, 24), output)], max_steps=40)
    reason, _ = stepper.left[0]
    fits = 1000 + output - 1 <= 1008  # the last token needs no page of its own
    assert reason == (("length" if output == 24 else "stop") if fits else "kv_capacity")
    assert stepper.scheduler.preemptions == 0, "it gains nothing from its own eviction"
    assert stepper.sequences[0].generated == min(output, 9)


def test_s4_a_blocked_head_hides_nothing_that_can_run():
    """270 blocks of 16; L holds 250 and needs 5, head H needs 100, W needs 10; 17 tokens each: 17 steps for L and W, 17 for H."""
    case = Case(blocks=271, max_batch_tokens=4000, max_batch_seqs=8)
    case = case.with_policy("batching", "chunked_prefill", head_of_line="skip", max_bypasses=16)
    scheduler, latency = case.scheduler(), Linear(0.01, 0.0, 0.0, 0.0)
    low = scheduler.submit(request(0, 0.0, 250 * 16 + 5 * 16), 0.0)
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, StepResult(latency.step_s(plan)))
    assert low.computed == 250 * 16 and scheduler.pool.free == 20
    head, waiting = scheduler.submit(request(1, 0.001, 100 * 16), 0.001), scheduler.submit(request(2, 0.002, 10 * 16), 0.002)
    steps, done = 0, {}
    while scheduler.has_work:
        plan = scheduler.schedule(0.01 * (steps + 1))
        steps += 1
        assert steps < 60
        ends = [(seq, "stop") for seq in (low, head, waiting) if seq.state == DECODING and seq.generated + plan.clock - seq.entry_clock >= 17]
        done.update({seq.request_id: steps for seq, _ in ends})
        scheduler.commit(plan, StepResult(0.01 * (steps + 1), ends))
        if steps == 1:
            assert plan.prefills == [low, waiting], "L and W go on"
    assert done == {0: 17, 2: 17, 1: 34}


def test_s4_with_block_the_head_hides_those_behind_it():
    case = Case(blocks=271, max_batch_tokens=4000)
    arrivals = [Arrival(request(0, 0.0, 4080), 17), Arrival(request(1, 0.001, 1600), 17), Arrival(request(2, 0.002, 160), 17)]
    blocked = serve(case, arrivals).columns["scheduled_s"]
    skipped = serve(case.with_policy("batching", "chunked_prefill", head_of_line="skip"), arrivals).columns["scheduled_s"]
    assert blocked[2] >= blocked[1] and skipped[2] < skipped[1]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_s4_a_head_is_passed_no_more_often_than_the_bound(bound):
    """Small requests keep coming; each would fit, so that without a bound the large one would wait for all of them."""
    case = Case(blocks=41, max_batch_tokens=512, max_batch_seqs=32)
    case = case.with_policy("batching", "chunked_prefill", head_of_line="skip", max_bypasses=bound)
    arrivals = [Arrival(request(0, 0.0, 16 * 20), 100), Arrival(request(1, 0.001, 16 * 30), 5)]
    arrivals += [Arrival(request(i, 0.002 + 0.001 * (i // 6), 16), 3) for i in range(2, 60)]
    scheduled = serve(case, arrivals).columns["scheduled_s"]
    assert sum(scheduled[2:] < scheduled[1]) == bound


def full_of_low_priority(case: Case, seats: int) -> tuple:
    """A scheduler all of whose seats are taken by requests of priority 1 that decode."""
    scheduler = case.scheduler()
    sequences = [scheduler.submit(request(i, 0.0, 32, priority=1), 0.0) for i in range(seats)]
    now_s = 0.0
    while not all(seq.state == DECODING for seq in sequences):
        plan = scheduler.schedule(now_s)
        now_s += 0.01
        scheduler.commit(plan, StepResult(now_s))
    return scheduler, sequences, now_s


@pytest.mark.parametrize("batching", ["chunked_prefill", "prefill_first", "whole_prompt"])
def test_s7_a_more_urgent_request_is_in_within_a_step(batching):
    case = Case(blocks=200, max_batch_seqs=8).with_policy("ordering", "priority", preempt="strict").with_policy("batching", batching)
    scheduler, sequences, now_s = full_of_low_priority(case, 8)
    equal = scheduler.submit(request(100, now_s, 32, priority=1), now_s)
    plan = scheduler.schedule(now_s)
    assert not plan.preempted and equal not in plan.admitted, "equal priorities never evict each other"
    scheduler.commit(plan, StepResult(now_s + 0.01))
    urgent = scheduler.submit(request(101, now_s, 32, priority=0), now_s)
    plan = scheduler.schedule(now_s + 0.01)
    assert plan.admitted == [urgent] and plan.preempted == [sequences[-1]]
    scheduler.check()


def test_s7_a_victim_is_taken_only_if_the_newcomer_then_fits():
    case = Case(blocks=33, max_batch_seqs=8).with_policy("ordering", "priority", preempt="strict")
    scheduler = case.scheduler()
    urgent = [scheduler.submit(request(i, 0.0, 16 * 10, priority=0), 0.0) for i in range(2)]
    low = scheduler.submit(request(2, 0.0, 16 * 5, priority=1), 0.0)
    now_s = 0.0
    for _ in range(3):
        plan = scheduler.schedule(now_s)
        now_s += 0.01
        scheduler.commit(plan, StepResult(now_s))
    assert {seq.state for seq in (*urgent, low)} == {DECODING}
    scheduler.submit(request(3, now_s, 16 * 12, priority=0), now_s)  # 32 blocks, 22 held by its equals: no eviction can help
    plan = scheduler.schedule(now_s)
    assert not plan.preempted and not plan.admitted
    scheduler.commit(plan, StepResult(now_s))
    scheduler.submit(request(4, now_s - 1, 16 * 9, priority=0), now_s)  # this one fits once the low one has gone
    plan = scheduler.schedule(now_s)
    assert plan.preempted == [low] and [seq.request_id for seq in plan.admitted] == [4]


def test_s7_nobody_is_evicted_while_the_window_is_closed():
    case = Case(blocks=200, max_batch_seqs=4).with_policy("ordering", "priority", preempt="strict")
    scheduler, _, now_s = full_of_low_priority(case.with_policy("window", "fixed", window_s=0.0, size=1), 4)
    scheduler._builder.window = case.with_policy("window", "fixed", window_s=0.5, size=9).policy("window")
    scheduler.submit(request(100, now_s, 32, priority=0), now_s)
    plan = scheduler.schedule(now_s)
    assert not plan.preempted and plan.decodes == 4 and plan.valid_until_s == now_s + 0.5
    scheduler.commit(plan, StepResult(now_s + 0.5))
    plan = scheduler.schedule(now_s + 0.5)
    assert len(plan.preempted) == len(plan.admitted) == 1


def test_s9_a_short_prompt_beside_a_very_long_one():
    case = Case(blocks=40_000, max_batch_tokens=16_384, max_batch_seqs=64, latency=Linear(0.02, 3e-5, 1e-4, 1e-8))
    long_one, short_one = Arrival(request(0, 0.0, 600_104), 10), Arrival(request(1, 2.0, 101), 10)
    alone = serve(case, [long_one])
    chunks = [row[5] for row in alone.decisions[0] if row[5]]
    assert len(chunks) == 37 == math.ceil(600_104 / 16_384)
    capped = Case(blocks=40_000, max_batch_tokens=16_384, max_batch_seqs=64, max_chunk_tokens=16_000, latency=case.latency)
    both = serve(capped, [long_one, short_one])
    step_s = case.latency.step_s(type("Shape", (), {"chunks": [(16_384, 0)], "decodes": 1, "decode_context_tokens": 600_000}))
    assert both.columns["first_token_s"][1] - 2.0 <= 3 * step_s
    assert both.columns["finish_s"][0] <= 1.10 * alone.columns["finish_s"][0]
    uncapped = serve(case, [long_one, short_one])
    assert uncapped.columns["first_token_s"][1] > uncapped.columns["first_token_s"][0] - step_s, "what the cap is for"


@pytest.mark.parametrize("passes", [0, 8, 32])
def test_s11_a_cold_request_is_passed_a_bounded_number_of_times(passes):
    """One at a time; 5 % of the requests share nothing, the others 96 % of their prompt with what is cached."""
    case = Case(blocks=400, max_batch_tokens=800, max_batch_seqs=1, latency=Linear(0.02, 1e-5, 0.0, 0.0))
    case = case.with_policy("ordering", "cache_affinity", max_passes=passes)
    hot = tuple(("hot", i) for i in range(24))
    arrivals = [Arrival(request(0, 0.0, 400, prefix_hashes=(*hot, ("own", 0))), 2)]
    for i in range(1, 300):
        keys = tuple(("cold", i, j) for j in range(25)) if i % 20 == 0 else (*hot, ("own", i))
        arrivals.append(Arrival(request(i, 0.5 + 0.001 * i, 400, prefix_hashes=keys), 2))
    columns = serve(case, arrivals).columns
    scheduled = columns["scheduled_s"]
    passed = [sum(scheduled[i + 1 :] < scheduled[i]) for i in range(20, 300, 20)]
    assert max(passed) <= passes
    assert columns["cached_tokens"][1::20].min() == 384
    if passes:
        assert max(passed) > passes // 2, "affinity has an effect at all"
