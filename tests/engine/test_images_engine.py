"""Images in the engine: encoded once, computed once, looked at by every text behind them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

import plain_forward

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.images import PATCH, Encoder
from engine.run import serve_scenario
from serving.errors import InputError
from serving.scenario import load

IMAGES = "workload.images={count: 3, zipf_exponent: 0.5, share: 0.7, tokens: {dist: uniform, min: 17, max: 60}}"
FEW = ("workload.requests=8", "kv_cache.blocks=80", "workload.output_tokens={dist: constant, value: 6}", "workload.prompt_tokens={dist: uniform, min: 8, max: 40}")


def serve(*changes: str):
    """Summary, rows and (image, prompt, answer) of each request, with the engine."""
    spec = load("engine-tiny", (*FEW, IMAGES, *changes))
    engine = build_engine(spec, Choices(device="cpu"))
    said = {}

    def prepare(loop):
        forget = loop._take_out

        def keep(request_id):
            stream = loop.streams[request_id]
            said[request_id] = (stream.request.image, stream.tokens[: stream.prompt_tokens], stream.tokens[stream.prompt_tokens :])
            forget(request_id)

        loop._take_out = keep

    return serve_scenario(spec, engine, ReportedClock(), prepare=prepare).summary, said, engine


def test_an_image_is_encoded_once_and_its_pages_are_shared_without_a_word_changed():
    shared, said, _ = serve()
    alone, again, _ = serve("workload.images.shared_pages=false")
    assert said == again and len(said) == 8
    pictured = {image for image, _, _ in said.values() if image is not None}
    assert shared["images"]["encoded"] == alone["images"]["encoded"] == len(pictured) >= 2
    assert shared["prefix_cache_hit_rate"] > 0.2 and alone["prefix_cache_hit_rate"] == 0.0
    assert shared["requests"]["completed"] == alone["requests"]["completed"] == 8


def test_answers_are_those_of_a_plain_forward_pass_over_image_and_text():
    _, said, engine = serve()
    weights, shape = engine.runner.decoder.weights, engine.runner.shape
    plain = plain_forward.weights_of(weights, shape)
    looked_at = [entry for entry in said.values() if entry[0] is not None][:2]
    for image, prompt, answer in looked_at:
        visual = [token for token in prompt if token >= engine.vocab]
        assert visual == engine.images.tokens_of(image) == prompt[: len(visual)] and len(visual) % 16 == 0
        assert weights.embedding[visual].abs().sum(dim=1).gt(0).all(), "the rows are there"
        expected = plain_forward.logits(plain, shape, prompt + answer)[len(prompt) - 1 : -1]
        best = expected.max(dim=1).values
        chosen = expected[torch.arange(len(answer)), torch.tensor(answer)]
        assert (best - chosen).max() < 1e-3, "the answer is the best, to rounding"
        assert max(answer) < engine.vocab, "nobody answers in pictures"


def test_another_image_before_the_same_text_says_something_else():
    table = torch.randn(50, 32)
    encoder = Encoder(table, 1)
    one, two = torch.randn(16, PATCH), torch.randn(16, PATCH)
    first = encoder.rows(one)
    assert first.shape == (16, 32) and torch.equal(first, encoder.rows(one)) and not torch.allclose(first, encoder.rows(two))
    assert float(first.pow(2).mean().sqrt()) == pytest.approx(float(torch.tanh(torch.tensor(1.0)) * table.pow(2).mean().sqrt()), rel=1e-2)
    assert Encoder(table, 1, gate=0.0).rows(one).abs().max() == 0.0
    moved = one.clone()
    moved[5] += 1.0
    assert not torch.allclose(encoder.rows(moved)[0], first[0]), "every patch is seen from each"


def test_what_the_engine_does_not_do_is_refused():
    with pytest.raises(InputError) as caught:
        build_engine(load("engine-tiny", (*FEW, IMAGES, "speculation={policy: {name: fixed, tokens: 2}, acceptance: 0.5}")), Choices(device="cpu"))
    assert caught.value.where.endswith("workload.images") or caught.value.where.startswith("speculation")
    with pytest.raises(InputError) as caught:
        build_engine(load("engine-tiny", (*FEW, IMAGES.replace("count: 3", "count: 900000"))), Choices(device="cpu"))
    assert caught.value.where == "workload.images.count"
