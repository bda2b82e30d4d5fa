"""Decodes and prompts beside each other: the plans of one stream, the text of one stream, and a fault that stays on its side."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import runner
from test_drafting import LARGE, SIZES, speculating
from test_loop import BURST, SHARED, TALKS, scenario, serve, stub

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.run import Engine, serve_scenario
from engine.step import SequenceInput, StepInput
from engine.stub_runner import StubRunner
from engine.two_streams import TwoStreams
from serving.records import open_run
from serving.scenario import load
from validate.parity import parity
from validate.rerun import differences


def streamed(spec, **options):
    batching = {**spec.resolved()["policy"]["batching"], "name": "two_streams", **options}
    return type(spec).model_validate({**spec.resolved(), "policy": {**spec.resolved()["policy"], "batching": batching}})


def served_to(folder, spec):
    beside = []

    class Watched(StubRunner):
        def launch(self, batch):
            beside.append(batch.beside)
            return super().launch(batch)

    runner = Watched(4, lambda batch: 0.01)
    serve_scenario(spec, Engine(runner, spec.kv_cache.blocks, 80, 1009, "stub"), ReportedClock(), out=folder)
    return open_run(folder).plans, beside


@pytest.mark.parametrize("workload", [{}, SHARED, TALKS], ids=["plain", "shared prefixes", "sessions"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_text_is_that_of_one_stream_and_no_page_is_met_from_both(workload, in_flight):
    _, expected = serve(scenario(blocks=2000, **workload))
    summary, found = serve(streamed(scenario(blocks=30, max_in_flight=in_flight, **workload), prefill_tokens=9))
    assert {one: answer for one, (_, answer) in found.items()} == {one: answer for one, (_, answer) in expected.items()}
    assert summary["preemptions"] > 0


def test_the_plans_are_those_of_one_stream_where_steps_take_as_long(tmp_path):
    one, alone = served_to(tmp_path / "one", scenario(blocks=34))
    two, beside = served_to(tmp_path / "two", streamed(scenario(blocks=34)))
    assert one.to_json() == two.to_json()
    assert alone == [None] * len(alone) and sum(at is not None for at in beside) > 20


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 9}])
def test_recorded_runs_replay_to_the_last_bit(options, tmp_path):
    spec = streamed(scenario(blocks=34, **SHARED), **options)
    served_to(tmp_path / "run", spec)
    assert parity(tmp_path / "run").differing_plans == 0
    assert differences(tmp_path / "run", stepwise=True) == [] == differences(tmp_path / "run", stepwise=False)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("graph_sizes", [(), (4, 16)])
def test_the_network_says_the_same_in_two_parts(graph_sizes, in_flight):
    _, expected = serve(scenario(blocks=400, requests=16, **BURST), runner(LARGE, blocks=400, **SIZES))
    both = TwoStreams(runner(LARGE, blocks=30, graph_sizes=graph_sizes, **SIZES))
    kinds = []
    collect = both.collect
    both.collect = lambda step: kinds.append((type(step).__name__, collect(step))) or kinds[-1][1]
    summary, found = serve(streamed(scenario(blocks=30, requests=16, **BURST, max_in_flight=in_flight), prefill_tokens=12), both)
    assert found == expected and summary["preemptions"] > 0
    mixed = [output.path for name, output in kinds if name == "Side"]
    assert len(mixed) > 10 and {path.kind for path in mixed} == ({"graph"} if graph_sizes else {"eager"})
    assert all(path.rows in (4, 16) for path in mixed) or not graph_sizes


def test_drafts_are_verified_beside_prompts():
    _, expected = serve(scenario(blocks=400, requests=16, **BURST), runner(LARGE, blocks=400, **SIZES))
    spec = streamed(speculating(scenario(blocks=30, requests=16, **BURST), 3))
    summary, found = serve(spec, TwoStreams(runner(LARGE, blocks=30, **SIZES)))
    assert found == expected and summary["speculation"]["steps"] > 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("side", ["prompts", "decodes"])
def test_a_part_that_raises_fails_its_request_alone(side, in_flight):
    _, expected = serve(scenario(blocks=400, requests=16, **BURST), runner(LARGE, blocks=400, **SIZES))
    both = TwoStreams(runner(LARGE, blocks=400, **SIZES))
    way = both._prompts if side == "prompts" else both.runner
    launch = way.launch

    def breaks(batch):
        if any(one.request_id in (9, 14) and (one.start > 8 or side == "prompts") for one in batch.sequences):
            raise RuntimeError("illegal address")
        return launch(batch)

    way.launch = breaks
    summary, found = serve(streamed(scenario(blocks=400, requests=16, **BURST, max_in_flight=in_flight)), both)
    failed = {one for one in found if len(found[one][1]) < len(expected[one][1])}
    assert failed and failed <= {9, 14} and summary["requests"]["failed"] == len(failed)
    assert {one: text for one, text in found.items() if one not in failed} == {one: text for one, text in expected.items() if one not in failed}


def test_a_step_of_nothing_but_prompts_that_cannot_run_names_them_all():
    both = TwoStreams(runner(LARGE, **SIZES))

    def lost(batch):
        raise RuntimeError("device lost")

    both._prompts.launch = lost
    parts = [SequenceInput(1, [5], 0, [1]), SequenceInput(2, [5, 6], 0, [2]), SequenceInput(3, [5, 6], 0, [3])]
    output = both.execute(StepInput(parts, beside=1))
    assert list(output.tokens) == [1] and set(output.errors) == {2, 3} and "device lost" in output.errors[2]


def test_a_scenario_on_two_streams_runs_and_has_parity(tmp_path):
    spec = load("engine-tiny", ["workload.requests=12", "policy.batching.name=two_streams", "workload.arrivals.rate_rps=60"])
    engine = build_engine(spec, Choices(device="cpu"))
    assert isinstance(engine.runner, TwoStreams)
    assert serve_scenario(spec, engine, ReportedClock(), out=tmp_path / "run").summary["requests"]["completed"] == 12
    assert parity(tmp_path / "run").differing_plans == 0
    assert differences(tmp_path / "run", stepwise=True) == []


def test_the_stub_sees_streams_that_meet():
    decode, prompt = SequenceInput(1, (5,), 4, [1, 2]), SequenceInput(2, [5, 6], 0, [2])
    engine = stub()
    engine.execute(StepInput([SequenceInput(1, [1, 2, 3, 4], 0, [1])]))
    with pytest.raises(AssertionError, match="meet in a page"):
        engine.execute(StepInput([decode, prompt], beside=1))
