"""Tokens that leave early: a plain forward pass with the same gates, whatever the chunks and the pool; layers that nobody needs are not run."""

from __future__ import annotations

import random
from dataclasses import replace

import plain_forward
import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from safetensors.torch import save_file
from stub_plans import CPU, TINY, generate, record_logits, runner
from test_loop import BURST, scenario, serve

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.early_exit import EarlyExit, Gate, load_gates, random_gates
from engine.loader import random_weights
from engine.run import serve_scenario
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.two_streams import TwoStreams
from serving.errors import InputError
from serving.scenario import load
from serving.scenario.weights import EarlyExit as Spec
from validate.parity import parity

DEEP = replace(TINY, layers=5)


def spec_of(*exits: tuple[int, float], acceptance: float = 1.0) -> Spec:
    return Spec(exits=[{"layer": layer, "share": share} for layer, share in exits], acceptance=acceptance)


def leaving(shape, exits: EarlyExit, seed=3, **options) -> Runner:
    weights = random_weights(shape, seed, device=CPU, dtype=torch.float32)
    sizes = {"blocks": 64, "block_tokens": 4, "max_seqs": 16, "max_batch_tokens": 128} | options
    return Runner(shape, weights, RunnerOptions(**sizes), exits=exits)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "torch") for name in ("plain", "bias and qk norm", "layers share", "experts")), ("bias and qk norm", "triton")]
)
def test_chunks_mixtures_and_preemptions_give_a_plain_forward_pass_with_the_same_gates(name, backend):
    shape = {"plain": DEEP, "bias and qk norm": replace(DEEP, qkv_bias=True, qk_norm=True),
             "layers share": replace(DEEP, kv_owners=(0, 1, 1, 1, 4)), "experts": replace(DEEP, experts=4, experts_per_token=2, expert_intermediate=24)}[name]  # fmt: skip
    if backend == "triton":
        shape = replace(shape, layers=3, kv_owners=shape.kv_owners[:3])
    exits = random_gates(spec_of((1, 0.4), (2, 0.3)), shape, 5, CPU)
    engine = leaving(shape, exits, **({"attention": "triton", "ops": "triton"} if backend == "triton" else {}))
    rng = random.Random(1)
    asked = {10 + one: [rng.randrange(shape.vocab) for _ in range(rng.randint(1, 20 if backend == "torch" else 7))] for one in range(4 if backend == "torch" else 2)}
    generated, seen = generate(engine, asked, 8 if backend == "torch" else 3, rng, preempt=0.1)
    plain = plain_forward.weights_of(engine.decoder.weights, shape)
    for request, prompt in asked.items():
        expected = plain_forward.logits(plain, shape, prompt + generated[request], gates=exits.gates)
        full = plain_forward.logits(plain, shape, prompt + generated[request])
        for position, row in seen[request].items():
            assert (row.double() - expected[position]).abs().max() < 1e-4, (request, position)
        assert (full - expected).abs().max() > 0.1
    assert 1 < exits.report()["mean_layers"] < shape.layers


def test_gates_that_stay_shut_change_nothing_and_gates_that_open_cut_the_network():
    text = [4, 9, 2, 7, 7, 1]

    def decode(engine):
        rows = record_logits(engine)
        engine.execute(StepInput([SequenceInput(1, text, 0, [1, 2])]))
        engine.execute(StepInput([SequenceInput(1, [5], 6, [1, 2])]))
        return rows[1]

    weights = random_weights(DEEP, 3, device=CPU, dtype=torch.float32)
    whole = decode(runner(DEEP, weights=weights))
    torch.testing.assert_close(decode(leaving(DEEP, random_gates(spec_of((2, 0.0)), DEEP, 1, CPU))), whole, atol=1e-5, rtol=1e-5)
    exits = random_gates(spec_of((2, 1.0)), DEEP, 1, CPU)
    cut = replace(weights, layers=weights.layers[:2])
    torch.testing.assert_close(decode(leaving(DEEP, exits)), decode(runner(replace(DEEP, layers=2), weights=cut)), atol=1e-5, rtol=1e-5)
    assert exits.report() == {"mean_layers": 2.0}


def test_layers_that_nobody_needs_are_not_run():
    exits = random_gates(spec_of((2, 1.0)), DEEP, 1, CPU)
    engine = leaving(DEEP, exits)
    ran = []
    attention = engine.decoder.attention
    engine.decoder.attention = lambda index, *rest: ran.append((index, len(rest[1]))) or attention(index, *rest)
    engine.execute(StepInput([SequenceInput(1, [5], 0, [1]), SequenceInput(2, [6], 0, [2])]))
    assert ran == [(0, 2), (1, 2)]
    ran.clear()
    engine.execute(StepInput([SequenceInput(1, [5], 1, [1]), SequenceInput(3, [6, 7], 0, [3])]))
    assert ran == [(0, 3), (1, 3), (2, 2), (3, 2), (4, 2)]


def test_random_gates_open_for_about_the_shares_asked_for():
    wide = replace(DEEP, hidden=512)
    exits = random_gates(spec_of((1, 0.5), (3, 0.2), acceptance=0.9), wide, 7, CPU)
    x = torch.randn(20_000, 512, generator=torch.Generator().manual_seed(2))
    first, second = (exits.gates[layer].open(x) for layer in (1, 3))
    assert first.double().mean() == pytest.approx(0.45, abs=0.03)
    assert (second & ~first).double().mean() == pytest.approx(0.18, abs=0.03)


def test_the_text_does_not_depend_on_the_pool_on_drafts_or_on_a_second_stream():
    shape = replace(DEEP, vocab=1009)

    def texts(blocks, wrap=lambda one: one, **changes):
        exits = random_gates(spec_of((1, 0.4), (3, 0.3)), shape, 5, CPU)
        raw = {**scenario(blocks=blocks, requests=16, **BURST).resolved(), **changes}
        return serve(type(scenario()).model_validate(raw), wrap(leaving(shape, exits, blocks=blocks, max_batch_tokens=64)))

    _, expected = texts(400)
    tight, found = texts(30)
    assert tight["preemptions"] > 0 and found == expected
    assert texts(30, speculation={"policy": {"name": "fixed", "tokens": 3}, "acceptance": 0.5})[1] == expected
    batching = {**scenario().resolved()["policy"]["batching"], "name": "two_streams"}
    assert texts(30, TwoStreams, policy={"batching": batching})[1] == expected


def test_gates_are_read_beside_the_weights(tmp_path):
    (tmp_path / "exit_gates").mkdir()
    save_file({"exits.2.weight": torch.arange(32.0), "exits.2.bias": torch.tensor(-3.0)}, str(tmp_path / "exit_gates" / "gates.safetensors"))
    gate = load_gates(spec_of((2, 0.5)), DEEP, tmp_path, CPU).gates[2]
    assert gate.bias == -3.0 and torch.equal(gate.weight, torch.arange(32.0))
    assert Gate(torch.tensor([1.0, 0.0]), -1.0).open(torch.tensor([[1.5, 9.0], [0.5, 9.0]])).tolist() == [True, False]
    with pytest.raises(InputError, match=r"lacks the tensor 'exits\.3\.weight' of shape \[32\]"):
        load_gates(spec_of((3, 0.5)), DEEP, tmp_path, CPU)
    with pytest.raises(InputError, match="no exit at layer 5"):
        random_gates(spec_of((5, 0.5)), DEEP, 1, CPU)


def test_a_scenario_with_exits_runs_and_has_parity(tmp_path):
    exits = "weights={early_exit: {exits: [{layer: 1, share: 0.5}, {layer: 2, share: 0.2}]}}"
    spec = load("engine-tiny", ["workload.requests=10", exits])
    summary = serve_scenario(spec, build_engine(spec, Choices(device="cpu")), ReportedClock(), out=tmp_path / "run").summary
    assert summary["requests"]["completed"] == 10 and 1.2 < summary["early_exit"]["mean_layers"] < 3.2
    assert parity(tmp_path / "run").differing_plans == 0
    with pytest.raises(InputError, match="without adapters or retention"):
        build_engine(load("engine-tiny", [exits, "adapters={slots: 2}"]), Choices(device="cpu"))
