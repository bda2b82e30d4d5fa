"""Paged, chunked, mixed execution equals a plain forward pass; sampled tokens do not depend on the batch; padding changes nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

import plain_forward
from stub_plans import CPU, MOE, TINY, generate, runner

from engine.architecture import RopeScaling
from engine.attention_trace import AttentionTrace
from engine.loader import random_weights
from engine.sampling import SamplingParams
from engine.step import LAST_SAMPLED, SequenceInput, StepInput
from serving.errors import InputError

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max=32)
SHAPES = {
    "gqa": TINY,
    "mha": replace(TINY, kv_heads=4),
    "mqa": replace(TINY, kv_heads=1, tied_embeddings=True),
    "odd group": replace(TINY, heads=6, kv_heads=2, head_dim=12),
    "llama3 rope": replace(TINY, rope_scaling=LLAMA3),
    "linear rope": replace(TINY, rope_scaling=RopeScaling("linear", 4.0)),
    "bias and qk norm": replace(TINY, qkv_bias=True, qk_norm=True),
    "window": replace(TINY, window=7),
    "half the layers windowed": replace(TINY, window=5, window_layers=1),
    "alibi band": replace(TINY, positions="alibi", window=9),
    "pairs share keys and values": replace(TINY, layers=4, kv_owners=(0, 0, 2, 2), qk_norm=True, qkv_bias=True),
    "three share": replace(TINY, layers=4, kv_owners=(0, 1, 1, 1)),
    "moe": MOE,
    "moe unnormalised, shared": replace(MOE, normalise_router=False, shared_intermediate=32),
}


def prompts(rng: random.Random, count: int, vocab: int) -> dict[int, list[int]]:
    return {10 + i: [rng.randrange(vocab) for _ in range(rng.randint(1, 30))] for i in range(count)}


def assert_logits_match(engine, weights, asked, generated, seen, tolerance=1e-4):
    plain = plain_forward.weights_of(weights, engine.shape)
    for request, prompt in asked.items():
        expected = plain_forward.logits(plain, engine.shape, prompt + generated[request])
        for position, row in seen[request].items():
            assert (row.double() - expected[position]).abs().max() < tolerance, (request, position)


@pytest.mark.parametrize("name", SHAPES)
def test_chunked_mixed_paged_execution_equals_a_plain_forward_pass(name):
    shape = SHAPES[name]
    for seed, block_tokens in ((1, 1), (2, 4), (3, 5), (4, 16)):
        rng = random.Random(seed)
        weights = random_weights(shape, seed, device=CPU, dtype=torch.float32)
        engine = runner(shape, weights=weights, blocks=1 + 256 // block_tokens, block_tokens=block_tokens, graph_sizes=(1, 2, 4))
        asked = prompts(rng, 4, shape.vocab)
        generated, seen = generate(engine, asked, 5, rng)
        assert_logits_match(engine, weights, asked, generated, seen)


@pytest.mark.parametrize("name", ["gqa", "window", "moe", "alibi band", "three share"])
def test_the_triton_backend_runs_the_same_network(name):
    shape = SHAPES[name]
    rng = random.Random(5)
    weights = random_weights(shape, 5, device=CPU, dtype=torch.float32)
    engine = runner(shape, weights=weights, attention="triton", ops="triton", graph_sizes=(2,))
    asked = prompts(rng, 2, shape.vocab)
    generated, seen = generate(engine, asked, 2, rng)
    assert_logits_match(engine, weights, asked, generated, seen)


def test_sampled_tokens_depend_on_the_request_alone():
    rng = random.Random(0)
    asked = prompts(rng, 5, TINY.vocab)
    sampling = {
        10: SamplingParams(temperature=1.0),
        11: SamplingParams(temperature=0.7, top_p=0.8, seed=4),
        12: SamplingParams(temperature=1.3, top_k=9),
        13: SamplingParams(temperature=1.0, seed=4),
        14: SamplingParams(),
    }
    alone = {}
    for request, prompt in asked.items():
        alone |= generate(runner(seed=8), {request: prompt}, 8, random.Random(1), sampling)[0]
    for seed in range(4):
        together, _ = generate(runner(seed=8, graph_sizes=(2, 4, 8)), asked, 8, random.Random(seed), sampling, preempt=0.2)
        assert together == alone
    assert alone[10] != generate(runner(seed=8), {10: asked[10]}, 8, random.Random(1), {10: SamplingParams(temperature=1.0, seed=5)})[0][10]


def test_padding_to_a_bucket_changes_nothing():
    shape = MOE
    asked = prompts(random.Random(3), 3, shape.vocab)
    eager, eager_logits = generate(runner(shape), asked, 6, random.Random(7))
    padded_runner = runner(shape, graph_sizes=(8,))
    padded, padded_logits = generate(padded_runner, asked, 6, random.Random(7))
    assert padded_runner.graphs.stats.replayed > 0
    assert padded == eager
    for request in asked:
        for position, row in eager_logits[request].items():
            torch.testing.assert_close(padded_logits[request][position], row, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ops", ["torch", "triton"])
def test_skipping_all_but_the_best_expert_is_a_network_of_one_expert_a_token(ops):
    weights = random_weights(MOE, 4, device=CPU, dtype=torch.float32)
    asked = prompts(random.Random(3), 2, MOE.vocab)
    small = {"graph_sizes": (4,), "ops": ops}
    _, single = generate(runner(replace(MOE, experts_per_token=1), weights=weights, **small), asked, 2, random.Random(7))
    _, skipping = generate(runner(MOE, weights=weights, skip_experts_below=1.0, **small), asked, 2, random.Random(7))
    _, both = generate(runner(MOE, weights=weights, **small), asked, 2, random.Random(7))
    for request in asked:
        for position, row in single[request].items():
            torch.testing.assert_close(skipping[request][position], row, atol=1e-5, rtol=1e-5)
    assert any((row - single[request][position]).abs().max() > 0.1 for request in asked for position, row in both[request].items())


def test_padding_writes_only_to_the_reserved_block():
    engine = runner(graph_sizes=(8,))
    before = [pages.clone() for pages in engine.cache.keys]
    result = engine.execute(StepInput([SequenceInput(1, [5], 0, [3])]))
    assert (result.path.kind, result.path.rows, result.path.padding) == ("graph", 8, 7)
    for was, now in zip(before, engine.cache.keys):
        changed = (was != now).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [0, 3]


def test_a_step_may_use_a_token_the_host_has_not_seen():
    def serve(blind: bool) -> list[int]:
        engine = runner(graph_sizes=(1,))
        found = list(engine.execute(StepInput([SequenceInput(1, [4, 9, 2], 0, [1, 2, 3])])).tokens[1])
        for position in range(3, 9):
            token = LAST_SAMPLED if blind else found[-1]
            found += engine.execute(StepInput([SequenceInput(1, [token], position, [1, 2, 3])])).tokens[1]
        return found

    assert serve(True) == serve(False)


def test_several_rows_of_one_sequence_can_be_sampled():
    tokens = [4, 9, 2, 7, 7, 1]
    engine = runner()
    whole = engine.execute(StepInput([SequenceInput(1, tokens, 0, [1, 2], sampled_rows=3)])).tokens[1]
    single = [runner().execute(StepInput([SequenceInput(1, tokens[:end], 0, [1, 2])])).tokens[1][0] for end in (4, 5, 6)]
    assert list(whole) == single


def test_a_request_at_fault_fails_alone():
    class Breaks:
        def __call__(self, logits, last):
            raise ValueError("no such state")

    engine = runner()
    good = SequenceInput(1, [4, 9], 0, [1])
    bad_token = SequenceInput(2, [4, TINY.vocab], 0, [2])
    bad_processor = SequenceInput(3, [4, 9], 0, [3], sampling=SamplingParams(processors=(Breaks(),)))
    alone = runner().execute(StepInput([good]))
    result = engine.execute(StepInput([bad_token, good, bad_processor]))
    assert result.tokens == alone.tokens
    assert "vocabulary" in result.errors[2] and "no such state" in result.errors[3]


def test_logits_that_are_not_finite_fail_their_request_only():
    engine = runner()
    engine.cache.values[0][5] = float("nan")
    result = engine.execute(StepInput([SequenceInput(1, [3], 1, [4]), SequenceInput(2, [3], 1, [5])]))
    assert list(result.tokens) == [1] and "finite" in result.errors[2]


def test_nothing_to_do_is_no_error():
    assert runner().execute(StepInput([])).tokens == {}


def test_lengths_and_sizes_are_checked():
    with pytest.raises(InputError, match="positions"):
        runner(max_model_len=4096)
    with pytest.raises(InputError, match="at least 2"):
        runner(blocks=1)
    with pytest.raises(InputError, match=r"GiB are free \(\d+ blocks fit\)"):
        runner(blocks=10**13)
    with pytest.raises(InputError, match="did you mean 'triton'"):
        runner(attention="tritn")
    with pytest.raises(RuntimeError, match="exceeds"):
        runner(max_batch_tokens=2).execute(StepInput([SequenceInput(1, [1, 2, 3], 0, [1])]))


def test_a_third_partys_backend_is_loaded_by_its_path():
    engine = runner(attention="engine.attention.torch_backend:TorchAttention")
    assert engine.execute(StepInput([SequenceInput(1, [3], 0, [1])])).tokens[1]
    with pytest.raises(InputError, match="cannot be loaded"):
        runner(attention="no_such_module:Thing")


def test_a_trace_names_the_tokens_that_were_attended_to():
    trace = AttentionTrace(layer=0, top=3)
    engine = runner(trace=trace, graph_sizes=(4,))
    prompt = [4, 9, 2, 7, 7, 1]
    engine.execute(StepInput([SequenceInput(1, prompt, 0, [1, 2]), SequenceInput(2, [5], 0, [3])]))
    single, last = trace.tokens
    assert (single.request_id, single.sources, single.entropy) == (2, ((0, 1.0),), 0.0)
    assert (last.request_id, last.position) == (1, 5)
    assert 0 < last.entropy <= torch.log(torch.tensor(6.0)) and len(last.sources) == 3
    # Against the probabilities of the plain network's first layer.
    w, shape = plain_forward.weights_of(engine.decoder.weights, TINY), TINY
    h = plain_forward._norm(w["embed"][prompt], w["0.an"], shape.norm_eps)
    q, k = ((h @ w[f"0.{n}"].T).view(6, -1, 16).transpose(0, 1) for n in "qk")
    q, k = plain_forward._rotate(q, shape), plain_forward._rotate(k, shape)
    mean = torch.stack([torch.softmax(q[i, -1] @ k[i // 2].T / 4.0, -1) for i in range(4)]).mean(0)
    best = sorted(range(6), key=lambda i: -mean[i].item())[:3]
    assert [position for position, _ in last.sources] == best
    assert last.sources[0][1] == pytest.approx(mean[best[0]].item(), abs=1e-5)
