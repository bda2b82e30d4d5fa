"""Draft tokens in the engine: whatever is proposed, the text is that without drafts; the plans are the simulator's; pages come back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import CPU, TINY, runner
from test_loop import BURST, SHARED, scenario, serve, stub

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.drafting import Ask, Draft
from engine.drafting.network import DraftNetwork
from engine.drafting.prompt_lookup import PromptLookup
from engine.flight import accepted
from engine.loader import random_weights
from engine.run import Engine, build_loop, serve_scenario
from engine.sampling import GREEDY, SamplingParams, sample_against
from engine.step import SequenceInput, StepInput
from serving.clients import start_clients
from serving.errors import InputError
from serving.records import open_run
from serving.scenario import load
from serving.scheduler import Scheduler
from validate.parity import parity, read, replay
from validate.rerun import differences

LARGE = replace(TINY, vocab=1009)  # the prompts of ``test_loop.scenario`` fit it


class Scripted:
    """Knows what each text becomes, and errs now and then."""

    def __init__(self, texts: dict[int, list[int]], right: float, seed: int) -> None:
        self.texts, self.right, self.rng = texts, right, random.Random(seed)
        self.asked: list[int] = []

    def propose(self, asks):
        self.asked += [ask.request_id for ask in asks]
        return [self._one(ask) for ask in asks]

    def _one(self, ask) -> Draft:
        known = self.texts[ask.request_id]
        assert known[: len(ask.tokens)] == ask.tokens
        drafts = known[len(ask.tokens) :][: ask.count]
        return Draft([token if self.rng.random() < self.right else 7 for token in drafts[: self.rng.randint(0, len(drafts))]])

    def release(self, request_id):
        self.asked.append(-request_id)


def speculating(spec, drafts: int, **speculation):
    values = {"policy": {"name": "fixed", "tokens": drafts}, "acceptance": 0.5, **speculation}
    return type(spec).model_validate({**spec.resolved(), "speculation": values})


def texts_of(said) -> dict[int, list[int]]:
    return {request_id: prompt + answer for request_id, (prompt, answer) in said.items()}


@pytest.fixture
def checked(monkeypatch):
    commit = Scheduler.commit

    def check_too(self, plan, result):
        commit(self, plan, result)
        self.check()

    monkeypatch.setattr(Scheduler, "commit", check_too)


def drafted(spec, proposer, *, out=None, prepare=lambda loop: None, make=stub):
    engine = Engine(make(), spec.kv_cache.blocks, 80, 1009, "stub", proposer=lambda: proposer)
    return serve_scenario(spec, engine, ReportedClock(), out=out, prepare=prepare).summary


@pytest.mark.parametrize("drafts", [1, 3, 9])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("workload", [{}, SHARED], ids=["plain", "shared prefixes"])
def test_any_drafts_on_any_pool_leave_the_text_as_it_was(workload, right, drafts, checked, monkeypatch):
    _, expected = serve(scenario(blocks=2000, **workload))
    proposer = Scripted(texts_of(expected), right, drafts)
    monkeypatch.setattr("engine.run.PromptLookup", lambda: proposer)
    for blocks in (34, 2000):
        summary, found = serve(speculating(scenario(blocks=blocks, **workload), drafts))
        assert found == expected
        assert (summary["preemptions"] > 0) == (blocks == 34)
        assert {-one for one in proposer.asked if one < 0} <= set(expected)
    figures = summary["speculation"]
    assert figures["acceptance"] == pytest.approx(right, abs=0.12)
    assert (figures["acceptance_length"] > 1.2) == (right > 0) and figures["draft_tokens"] <= drafts


@pytest.mark.parametrize("policy", [{"name": "fixed", "tokens": 4}, {"name": "small_batch", "tokens": 4, "budget_tokens": 9}])
def test_what_was_accepted_makes_the_simulator_take_the_same_steps(policy, tmp_path):
    _, expected = serve(scenario(blocks=2000))
    spec = speculating(scenario(blocks=34), 4, policy=policy)
    summary = drafted(spec, Scripted(texts_of(expected), 0.7, 1), out=tmp_path / "run")
    assert summary["preemptions"] > 0 and summary["speculation"]["steps"] > 10
    assert parity(tmp_path / "run").differing_plans == 0
    assert differences(tmp_path / "run", stepwise=True) == [] == differences(tmp_path / "run", stepwise=False)
    accepted_by_step = open_run(tmp_path / "run").plans["accepted"]
    assert max(max(row) for row in accepted_by_step if len(row)) > 1
    recorded = read(open_run(tmp_path / "run"))
    at = next(at for at, row in enumerate(recorded.rows) if any(got > 1 for got in row.accepted))
    recorded.rows[at] = recorded.rows[at]._replace(accepted=[1] * len(recorded.rows[at].accepted))
    assert replay(recorded).differing_plans > 0  # a step that brought less than was recorded does not go unseen


def test_an_abort_between_launch_and_commit_loses_no_token_and_no_page(checked):
    _, expected = serve(scenario(blocks=2000))
    left = {}

    class Told:
        submitted = aborted = planned = stepped = lambda self, one: None

        def left(self, one):
            left[one.request.request_id] = (one.status, one.seq.generated)

    spec, seen = speculating(scenario(blocks=60), 3), {}
    engine = Engine(stub(), 60, 80, 1009, "stub", proposer=lambda: Scripted(texts_of(expected), 0.7, 3))

    def count(end_s, tokens, gone):
        for request_id, new in tokens.items():
            if left.get(request_id, ("",))[0] == "aborted":
                continue  # nobody listens
            before = seen.get(request_id, 0)
            seen[request_id] = before + len(new)
            if not request_id % 3 and before < 4 <= seen[request_id]:
                loop.env.at(end_s + 0.004, lambda _, one=request_id: loop.drop(one))  # steps take 10 ms: in the middle of the next

    loop = build_loop(spec, engine, ReportedClock(), observer=Told(), on_tokens=count)
    start_clients(loop, spec.workload, seed=3, block_tokens=4, max_model_len=80, prefix_caching=True, slo=spec.slo)
    loop.run()
    dropped = {one: row for one, row in left.items() if row[0] == "aborted"}
    assert len(dropped) > 5 and sum(generated for _, generated in dropped.values()) > 20
    assert {one: generated for one, (_, generated) in left.items() if generated} == seen
    assert loop.scheduler.pool.free == loop.scheduler.pool.total


def test_tokens_behind_one_that_stops_do_not_count():
    assert accepted([5, 6, 7], (5, 6, 9, 1), frozenset()) == (5, 6, 9)
    assert accepted([5, 6, 7], (5, 6, 7, 1), frozenset()) == (5, 6, 7, 1)
    assert accepted([5, 6, 7], (4, 6, 7, 1), frozenset()) == (4,)
    assert accepted([5, 6, 7], (5, 6, 7, 1), frozenset({6})) == (5, 6)
    assert accepted([], (3,), frozenset({3})) == (3,)


def test_look_up_finds_the_longest_and_latest_run_that_occurred_before():
    rng = random.Random(4)
    lookup = PromptLookup(longest=3, shortest=1)
    for request_id in range(20):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        for _ in range(25):
            found = lookup.propose([Ask(request_id, text, 3, [], GREEDY)])[0].tokens
            assert list(found) == looked_up(text, 3), text
            text = text + [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        lookup.release(request_id)


def looked_up(text: list[int], count: int) -> list[int]:
    for size in (3, 2, 1):
        for end in range(len(text) - 1, size - 1, -1):
            if size < len(text) and text[end - size : end] == text[-size:]:
                return text[end : end + count]
    return []


def network(layers: int, seed: int, **options):
    """A runner that drafts, with the first ``layers`` layers of the weights of ``seed``."""
    weights = random_weights(LARGE, seed, device=CPU, dtype=torch.float32)
    weights.layers = weights.layers[:layers]
    return DraftNetwork(runner(replace(LARGE, layers=layers), weights=weights, drafts=True, **options))


SIZES = {"max_seqs": 16, "max_batch_tokens": 64}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_network_says_the_same_whoever_drafts(temperature, monkeypatch):
    _, greedy = serve(scenario(blocks=400, requests=16, **BURST), runner(LARGE, blocks=400, **SIZES))
    if temperature:
        monkeypatch.setattr("engine.messages.Submission.__new__.__defaults__", (None, frozenset(), SamplingParams(temperature=temperature)))
    _, expected = serve(scenario(blocks=400, requests=16, **BURST), runner(LARGE, blocks=400, **SIZES))
    assert (expected == greedy) == (not temperature)
    proposers = {"look-up": PromptLookup, "layers": lambda: network(1, 3, blocks=26, **SIZES), "scripted": lambda: Scripted(texts_of(expected), 0.8, 2)}
    for name, make in proposers.items():
        if temperature and name == "layers":
            continue  # drawn drafts keep the distribution, not the draws
        proposer = make()
        monkeypatch.setattr("engine.run.PromptLookup", lambda proposer=proposer: proposer)
        summary, found = serve(speculating(scenario(blocks=26, requests=16, **BURST), 4), runner(LARGE, blocks=26, **SIZES))
        assert found == expected, name
        assert summary["preemptions"] > 0 and summary["speculation"]["steps"] > 0, name
        assert summary["speculation"]["draft_tokens"] > 0, name


def test_a_drafter_that_is_the_network_itself_is_always_right(monkeypatch):
    monkeypatch.setattr("engine.run.PromptLookup", lambda: network(2, 3, blocks=34, **(SIZES | {"max_batch_tokens": 20})))
    summary, _ = serve(speculating(scenario(blocks=34, requests=16, **BURST), 4), runner(LARGE, blocks=34, **SIZES))
    assert summary["preemptions"] > 0
    assert summary["speculation"]["acceptance"] == 1.0 and summary["speculation"]["acceptance_length"] > 3


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(temperature=1.2, top_k=4), SamplingParams(temperature=1.0, top_p=0.6)])
def test_rejection_sampling_keeps_the_distribution_exactly(params):
    generator, count = torch.Generator().manual_seed(1), 200_000
    logits = torch.randn(8, generator=generator) * 1.5
    q = torch.softmax(torch.randn(8, generator=generator, dtype=torch.float64), -1)
    q[2] = 0.0  # never proposed
    q /= q.sum()
    rng = np.random.default_rng(2)
    drafts = torch.from_numpy(rng.choice(8, count, p=q.numpy()))
    found = sample_against(logits.expand(count, 8), [params] * count, drafts, q.expand(count, 8), rng.random(count), rng.random(count))
    expected = distribution_of(logits, params)
    share = torch.bincount(found, minlength=8) / count
    assert ((share - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt() + 1e-12).all()
    took = (found == drafts).double().mean().item()
    assert took == pytest.approx(torch.minimum(expected, q).sum().item(), abs=0.006)  # as often as any rule can


def distribution_of(logits, params):
    """By hand: keep the best, renormalise."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    order = p.argsort(descending=True)
    keep = order[: params.top_k or 8]
    p = torch.zeros(8, dtype=torch.float64).index_put((keep,), p[keep])
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def test_a_text_of_drawn_drafts_is_distributed_as_without_them():
    """Joint frequencies of the second and third token of an answer, against those that the network gives."""
    shape, count = replace(TINY, vocab=4), 1800
    weights = random_weights(shape, 5, device=CPU, dtype=torch.float32)
    engine = runner(shape, weights=weights, blocks=260, max_seqs=64, max_batch_tokens=512)
    small = replace(weights, layers=weights.layers[:1])
    proposer = DraftNetwork(runner(replace(shape, layers=1), weights=small, blocks=260, max_seqs=64, max_batch_tokens=512, drafts=True))
    prompt, heat = [1, 3, 0], SamplingParams(temperature=1.0)
    counts, taken, released = torch.zeros(4, 4), 0, ()
    for first in range(0, count, 60):
        ids = range(first, first + 60)
        tables = {one: [1 + 4 * (one - first) + at for at in range(4)] for one in ids}
        begun = engine.execute(StepInput([SequenceInput(one, prompt, 0, tables[one], 1, heat) for one in ids], released)).tokens
        texts = {one: [*prompt, *begun[one]] for one in ids}
        drafts = proposer.propose([Ask(one, texts[one], 1, tables[one], heat) for one in ids])
        entries = [SequenceInput(one, [texts[one][-1], *draft.tokens], 3, tables[one], 2, heat, drafted=draft.probabilities) for one, draft in zip(ids, drafts)]
        for one, chosen in engine.execute(StepInput(entries)).tokens.items():
            got = accepted(entries[one - first].tokens[1:], chosen, frozenset())
            taken += len(got) - 1
            texts[one] += got
        short = [one for one in ids if len(texts[one]) < 6]
        rest = engine.execute(StepInput([SequenceInput(one, texts[one][-1:], 4, tables[one], 1, heat) for one in short])).tokens
        for one in ids:
            second, third = (*texts[one][4:], *rest.get(one, ()))[:2]
            counts[second, third] += 1
            proposer.release(one)
        released = tuple(ids)
    expected = joint(shape, weights, prompt) * count
    assert 0.5 * count < taken < 0.99 * count
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees of freedom: 0.1 %


def joint(shape, weights, prompt):
    """P(second, third token) of an answer, summed over the first."""
    single = runner(shape, weights=weights)
    rows = []
    forward = single._forward
    single._forward = lambda layout, path: rows.append(forward(layout, path)) or rows[-1]
    pairs = torch.zeros(4, 4)

    def after(text):
        single.execute(StepInput([SequenceInput(1, text, 0, [1, 2])], (1,)))
        return torch.softmax(rows[-1][-1].double(), -1)

    start = after(prompt)
    for one in range(4):
        second = after([*prompt, one])
        for two in range(4):
            pairs[two] += (start[one] * second[two] * after([*prompt, one, two])).float()
    return pairs


def tiny(*overrides: str):
    return load("engine-tiny", ["workload.requests=10", "workload.arrivals=all_at_once", "kv_cache.blocks=30", *overrides])


SPECULATION = "speculation={{policy: {{name: fixed, tokens: 3}}, acceptance: 0.5, proposer: {}}}"


@pytest.mark.parametrize("proposer", ["{name: layers, layers: 1}", "{name: prompt_lookup, longest: 2}"])
def test_a_scenario_with_speculation_runs_and_has_parity(proposer, tmp_path):
    spec = tiny(SPECULATION.format(proposer))
    result = serve_scenario(spec, build_engine(spec, Choices(device="cpu")), ReportedClock(), out=tmp_path / "run")
    assert result.summary["requests"]["completed"] == 10 and result.summary["speculation"]["steps"] > 0
    assert parity(tmp_path / "run").differing_plans == 0
    assert differences(tmp_path / "run", stepwise=True) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([SPECULATION.format("{name: layers, layers: 9}")], "must lie between 1 and"),
        ([SPECULATION.format("lookup")], "did you mean 'prompt_lookup'"),
        ([SPECULATION.format("{name: prompt_lookup, shortest: 9}")], "shortest <= longest"),
        ([SPECULATION.format("{name: prompt_lookup, size: 9}")], "does not take these options"),
        ([SPECULATION.format("network")], "must be named"),
        ([SPECULATION.format("null"), "speculation.draft_llm=smollm2-135m"], "one vocabulary"),
        ([SPECULATION.format("null"), "policy.batching.max_in_flight=2"], "needs this one's tokens"),
        ([SPECULATION.format("null"), "retention.policy=window", "kv_cache.prefix_caching=false"], "drops no pages"),
    ],
)
def test_what_cannot_draft_is_refused(overrides, message):
    spec = tiny(*overrides)
    with pytest.raises(InputError, match=message):
        build_loop(spec, build_engine(spec, Choices(device="cpu", attention="torch")), ReportedClock())
