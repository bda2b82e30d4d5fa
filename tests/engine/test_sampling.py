"""Sampling draws from the right distribution, row by row, and logits processors do what their formulas say."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from engine.logits import build
from engine.sampling import GREEDY, NOT_FINITE, SamplingParams, request_seeds, sample, uniforms
from serving.errors import InputError

LOGITS = torch.tensor([1.0, 3.0, 0.5, 2.0, -1.0])


def draw(params, count=4000, logits=LOGITS):
    """Frequencies of ``count`` independent draws of one row."""
    u = uniforms(np.full(count, 9), np.arange(count))
    tokens = sample(logits.expand(count, -1), [params] * count, u)
    return torch.bincount(tokens, minlength=logits.shape[0]) / count


def test_greedy_takes_the_largest():
    assert sample(LOGITS[None], [GREEDY], np.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax(temperature):
    expected = torch.softmax(LOGITS / temperature, 0)
    assert (draw(SamplingParams(temperature=temperature)) - expected).abs().max() < 0.025  # about 3 standard errors of 4,000 draws


def test_top_k_and_top_p_cut_the_tail_and_renormalise():
    p = torch.softmax(LOGITS, 0)  # in order of size: tokens 1, 3, 0, 2, 4
    two = torch.zeros(5).index_put((torch.tensor([1, 3]),), p[[1, 3]] / p[[1, 3]].sum())
    assert (draw(SamplingParams(temperature=1.0, top_k=2)) - two).abs().max() < 0.025
    just_beyond_one, just_below_one = float(p[1]) + 1e-3, float(p[1]) - 1e-3
    assert (draw(SamplingParams(temperature=1.0, top_p=just_beyond_one)) - two).abs().max() < 0.025
    assert draw(SamplingParams(temperature=1.0, top_p=just_below_one)).tolist() == [0, 1, 0, 0, 0]
    assert draw(SamplingParams(temperature=1.0, top_p=1e-9)).tolist() == [0, 1, 0, 0, 0]
    # Top-k first: of the two left, 0.73 already reaches 0.7 of their mass.
    assert draw(SamplingParams(temperature=1.0, top_k=2, top_p=0.7)).tolist() == [0, 1, 0, 0, 0]


def test_forbidden_tokens_are_never_drawn_even_at_the_ends():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    for u in (0.0, 1 - 2.0**-32):
        for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5)):
            assert sample(logits[None], [params], np.array([u])).item() in (1, 3)


def test_rows_are_independent():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 50, generator=g)
    params = [GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=0.5, top_p=0.9), SamplingParams(temperature=2.0, top_k=5)] * 2
    draws = uniforms(np.arange(6), np.arange(6))
    together = sample(logits, params[:6], draws)
    assert together.tolist() == [sample(logits[i : i + 1], [params[i]], draws[i : i + 1]).item() for i in range(6)]


def test_rows_that_are_not_finite_are_marked():
    logits = torch.stack([LOGITS, LOGITS.clone(), torch.full((5,), -math.inf)])
    logits[1, 2] = math.nan
    assert sample(logits, [GREEDY] * 3, np.zeros(3)).tolist() == [1, NOT_FINITE, NOT_FINITE]


def test_random_numbers_are_uniform_and_differ_by_seed_and_position():
    u = uniforms(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    assert len(np.unique(u)) > 9990 and u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.01 and abs(np.histogram(u, 10, (0, 1))[0] - 1000).max() < 120
    by_seed = u.reshape(100, 100)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.04


def test_a_requests_own_seed_wins_over_the_engines():
    first = request_seeds(1, [5, 6], [None, 77])
    second = request_seeds(2, [5, 8], [None, 77])
    assert first[0] != second[0] and first[1] == second[1] == 77
    assert request_seeds(1, [6, 5], [None, None])[1] == first[0]


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}])
def test_parameters_are_checked(bad):
    with pytest.raises(InputError, match=r"sampling\."):
        SamplingParams(**bad)


def apply(spec, logits=LOGITS, last=0):
    (process,) = build([spec], logits.shape[-1])
    return process(logits[None].clone(), torch.tensor([last]))[0]


def test_entropy_rescale_multiplies_by_the_exponential_of_the_entropy():
    p = torch.softmax(LOGITS, 0)
    entropy = -(p * p.log()).sum()
    torch.testing.assert_close(apply("entropy_rescale"), LOGITS * torch.exp(-0.3 * entropy))
    torch.testing.assert_close(apply({"name": "entropy_rescale", "beta": 1.0}), LOGITS * torch.exp(-entropy))
    sure = torch.tensor([0.0, 50.0, 0.0])
    torch.testing.assert_close(apply("entropy_rescale", sure), sure)
    assert apply("entropy_rescale", torch.tensor([-math.inf, 1.0, 2.0]))[0] == -math.inf


def test_confidence_filter_keeps_confident_candidates_and_the_best_always():
    kept = apply({"name": "confidence_filter", "width": 3, "min_probability": 0.1})
    assert torch.isfinite(kept).tolist() == [False, True, False, True, False]  # token 0 has 0.08
    kept = apply({"name": "confidence_filter", "width": 2, "min_probability": 0.0})
    assert torch.isfinite(kept).sum() == 2
    kept = apply({"name": "confidence_filter", "min_probability": 1.0})
    assert torch.isfinite(kept).tolist() == [False, True, False, False, False]


def test_posterior_reweight_multiplies_probabilities():
    before, after = torch.softmax(LOGITS, 0), torch.softmax(apply({"name": "posterior_reweight", "factors": {0: 4.0, 1: 0.5, 4: 0.0}}), 0)
    weighted = before * torch.tensor([4.0, 0.5, 1.0, 1.0, 0.0])
    torch.testing.assert_close(after, weighted / weighted.sum())


def test_successor_mask_follows_the_graph():
    spec = {"name": "successor_mask", "successors": {0: [2, 3], 3: [0]}}
    assert torch.isfinite(apply(spec, last=0)).nonzero().flatten().tolist() == [2, 3]
    assert torch.isfinite(apply(spec, last=3)).nonzero().flatten().tolist() == [0]
    assert torch.equal(apply(spec, last=1), LOGITS)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("entropy_rescal", "did you mean 'entropy_rescale'"),
        ({"name": "entropy_rescale", "gamma": 1}, "does not take these options"),
        ({"name": "confidence_filter", "width": 0}, "outside 1 to 5"),
        ({"name": "posterior_reweight", "factors": {9: 1.0}}, "outside the vocabulary of 5"),
        ({"name": "posterior_reweight", "factors": {1: -1.0}}, "negative"),
        ({"name": "successor_mask", "successors": {1: []}}, "no successor"),
        ("no_such_module:Thing", "cannot be loaded"),
    ],
)
def test_mistakes_in_processors_are_named(spec, message):
    with pytest.raises(InputError, match=message):
        build([spec], 5)


def test_a_third_partys_processor_is_loaded_by_its_path():
    assert len(build(["engine.logits:EntropyRescale"], 5)) == 1
