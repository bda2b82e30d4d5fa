"""What must hold of any scheduler run, whatever the policies and however small the pool; checked after every step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drivers import Case, random_aborts, random_arrivals, random_case, request
from stepper import Stepper

from serving.policies import load
from serving.request import Arrival


def true_tokens(arrivals: list[Arrival]) -> dict[int, int]:
    """Tokens that each request will generate if nothing stops it."""
    return {arrival.request.request_id: min(arrival.output_tokens, arrival.request.max_output_tokens) for arrival in arrivals}


def assert_conserved(stepper: Stepper, arrivals: list[Arrival]) -> None:
    """Every request leaves once, with its tokens and with its times in order; no token appears or is lost."""
    expected = true_tokens(arrivals)
    assert set(stepper.refused) | set(stepper.left) == set(expected)
    assert not set(stepper.refused) & set(stepper.left)
    for request_id, (reason, left_s) in stepper.left.items():
        seq = stepper.sequences[request_id]
        if reason in ("stop", "length"):
            assert seq.generated == expected[request_id]
            assert (reason == "length") == (expected[request_id] >= seq.request.max_output_tokens)
        assert seq.generated <= expected[request_id]
        assert (seq.generated > 0) == (seq.first_token_s == seq.first_token_s)
        times = [t for t in (seq.request.arrival_s, seq.scheduled_s, seq.first_token_s, left_s) if t == t]
        assert times == sorted(times)
        assert seq.cached_tokens < seq.request.prompt_tokens
    generated = sum(seq.generated for seq in stepper.sequences.values())
    if stepper.case.max_in_flight == 1:
        assert generated == stepper.sampled
    else:  # a decode planned before its sequence was known to have ended makes a token that nobody wants
        assert generated <= stepper.sampled


def bound_on_steps(case: Case, arrivals: list[Arrival]) -> int:
    """Far more steps than one sequence at a time, recomputed now and then, could need."""
    chunk = min(case.max_chunk_tokens or case.max_batch_tokens, case.max_batch_tokens)
    return 4 * sum(arrival.output_tokens + arrival.request.prompt_tokens // chunk + 2 for arrival in arrivals)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_random_workloads(seed, max_in_flight):
    case = replace(random_case(seed), max_in_flight=max_in_flight)
    arrivals = random_arrivals(seed, case)
    aborts = random_aborts(seed, arrivals) if seed % 2 else []
    stepper = Stepper(case).run(arrivals, aborts, bound_on_steps(case, arrivals))
    assert_conserved(stepper, arrivals)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(1000, 1016))
def test_every_block_read_holds_what_was_written_for_it(seed, max_in_flight):
    """As an engine would see it: tables named, content kept, plans executed in order, prefixes truly shared."""
    case = replace(random_case(seed), block_tokens=4, blocks=24 + 8 * (seed % 3), max_in_flight=max_in_flight, prefix_caching=True)
    arrivals = [arrival for arrival in random_arrivals(seed, case, requests=30) if consistent(arrival)]
    stepper = Stepper(case, memory=True).run(arrivals, random_aborts(seed, arrivals))
    assert_conserved(stepper, arrivals)
    assert sum(seq.cached_tokens for seq in stepper.sequences.values()) > 0


def consistent(arrival: Arrival) -> bool:
    """Whether equal keys mean equal tokens: generated content of a session is named by position only."""
    return arrival.request.generated_hash_seed is None


def test_the_random_cases_are_worth_it():
    """They preempt, refuse, hit the wall, abort in every state, share prefixes and leave nobody out."""
    seen: dict[str, int] = {"preempted": 0, "refused": 0, "wall": 0, "aborted": 0, "cached": 0, "evicted": 0}
    for seed in range(40):
        case = random_case(seed)
        arrivals = random_arrivals(seed, case)
        stepper = Stepper(case).run(arrivals, random_aborts(seed, arrivals))
        seen["preempted"] += stepper.scheduler.preemptions
        seen["refused"] += len(stepper.refused)
        seen["wall"] += sum(reason == "kv_capacity" for reason, _ in stepper.left.values())
        seen["aborted"] += sum(reason == "aborted" for reason, _ in stepper.left.values())
        seen["cached"] += sum(seq.cached_tokens for seq in stepper.sequences.values())
        seen["evicted"] += stepper.scheduler.pool.evictions
    assert min(seen.values()) > 20, seen


@pytest.mark.parametrize("batching", ["chunked_prefill", "prefill_first", "whole_prompt"])
@pytest.mark.parametrize("preempt", ["none", "strict", "deadline"])
@pytest.mark.parametrize("victim", ["latest", "lowest_priority", "least_progress"])
@pytest.mark.parametrize("window", ["none", "fixed", "qos_adaptive", "rtt_adaptive"])
def test_every_combination_ends_and_conserves(batching, preempt, victim, window):
    case = Case(blocks=19, block_tokens=4, max_batch_tokens=32, max_batch_seqs=6)
    case = case.with_policy("batching", batching).with_policy("ordering", "priority", preempt=preempt)
    case = case.with_policy("preemption", victim).with_policy("window", window)
    arrivals = random_arrivals(77, case, requests=25)
    assert_conserved(Stepper(case).run(arrivals, [], bound_on_steps(case, arrivals)), arrivals)


@pytest.mark.parametrize("batching", ["chunked_prefill", "prefill_first", "whole_prompt"])
@pytest.mark.parametrize("seed", range(12))
def test_work_conservation(batching, seed):
    """With no window, nobody is left waiting at a step boundary whom seats, tokens and blocks would have allowed in."""
    case = random_case(seed).with_policy("window", "none").with_policy("batching", batching)
    stepper = Stepper(case)
    left_waiting = []
    check = stepper._check_plan

    def check_plan(plan) -> None:
        check(plan)
        scheduler, head = stepper.scheduler, stepper.scheduler.head()
        assert not (plan.empty and scheduler.waiting_count), "idle with work queued"
        if head is None or plan.preempted or plan.ended or (batching == "whole_prompt" and plan.chunks):
            return
        if any(seq not in plan.prefills for seq in scheduler.partials):
            return  # blocks or tokens ran short for a prefill in progress: nobody passes it
        tokens = case.max_batch_tokens - sum(new for new, _ in plan.chunks) - (0 if batching == "whole_prompt" else plan.decodes)
        blocks, _ = scheduler._builder.needs(head)
        if len(scheduler.running) < case.max_batch_seqs and tokens > 0 and blocks <= scheduler.pool.free:
            left_waiting.append((plan.step, head))

    stepper._check_plan = check_plan
    arrivals = random_arrivals(seed, case)
    stepper.run(arrivals, [], bound_on_steps(case, arrivals))
    assert not left_waiting


def test_an_abort_in_every_state_gives_everything_back():
    case = Case(blocks=40, block_tokens=4, max_batch_tokens=16, max_batch_seqs=2)
    scheduler = case.scheduler()
    decoding, prefilling, waiting = (scheduler.submit(request(i, 0.0, prompt), 0.0) for i, prompt in ((1, 8), (2, 60), (3, 8)))
    from serving.plan import StepResult

    plan = scheduler.schedule(0.0)
    assert [seq.state for seq in (decoding, prefilling, waiting)] == [2, 1, 0]
    for request_id in (3, 2):
        assert scheduler.abort(request_id, 0.5).state == 5
    scheduler.check()
    scheduler.commit(plan, StepResult(1.0))
    plan = scheduler.schedule(1.0)
    assert scheduler.abort(1, 1.5).generated == 1, "the token under way reaches nobody"
    scheduler.commit(plan, StepResult(2.0))
    scheduler.check()
    assert scheduler.abort(1, 2.0) is None and scheduler.abort(99, 2.0) is None
    assert not scheduler.has_work and scheduler.pool.free == scheduler.pool.total


def test_plans_commit_in_order_and_no_further_ahead_than_allowed():
    from serving.plan import StepResult

    scheduler = Case(max_in_flight=2).scheduler()
    scheduler.submit(request(1), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="in flight already"):
        scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="not the oldest"):
        scheduler.commit(second, StepResult(1.0))
    assert first.completing and second.decodes == 1


def test_a_policy_that_neither_plans_nor_says_when_is_named():
    from serving.errors import BrokenPolicyError

    class Idle:
        def plan(self, batch):
            pass

    scheduler = Case().with_policy("batching", Idle).scheduler()
    scheduler.submit(request(1), 0.0)
    with pytest.raises(BrokenPolicyError, match=r"Idle, step 0: .* when to ask again"):
        scheduler.schedule(0.0)


def test_all_shipped_policies_take_part():
    """A new policy file must join the random cases."""
    import drivers

    from serving.policies import names

    listed = {
        "ordering": drivers.ORDERINGS, "batching": drivers.BATCHINGS, "window": drivers.WINDOWS, "preemption": drivers.VICTIMS,
        "admission": drivers.ADMISSIONS, "routing": drivers.ROUTINGS,
    }  # fmt: skip
    for kind, choices in listed.items():
        assert {name for name, _ in choices} == set(names(kind)), kind
        for name, options in choices:
            load(kind, name, options)
