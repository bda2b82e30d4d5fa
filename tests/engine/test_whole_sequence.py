"""Attribution agrees with finite differences; the error of cheaper positions is measured layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

import plain_forward
from stub_plans import CPU, MOE, TINY, runner

from engine.attention import alibi_slopes
from engine.loader import random_weights
from engine.step import SequenceInput, StepInput
from engine.whole_sequence import gradient_attribution, hidden_states, layer_errors

TOKENS = torch.tensor([3, 14, 15, 3, 2, 60])


@pytest.mark.parametrize("shape", [TINY, MOE, replace(TINY, positions="alibi", window=3)])
def test_whole_sequences_equal_the_plain_forward_pass(shape):
    weights = random_weights(shape, 1, device=CPU, dtype=torch.float64)
    found = hidden_states(shape, weights, TOKENS) @ weights.lm_head.T
    torch.testing.assert_close(found, plain_forward.logits(plain_forward.weights_of(weights, shape), shape, TOKENS.tolist()), atol=1e-6, rtol=1e-6)


def test_attribution_is_the_directional_derivative_along_each_tokens_embedding():
    weights = random_weights(TINY, 1, device=CPU, dtype=torch.float64)
    found = gradient_attribution(TINY, weights, TOKENS, target=7)
    rows = weights.embedding[TOKENS]
    for position in range(len(TOKENS)):
        values = []
        for step in (1e-5, -1e-5):
            moved = rows.clone()
            moved[position] *= 1 + step
            values.append(hidden_states(TINY, replace(weights, embedding=moved), torch.arange(6))[-1] @ weights.lm_head[7])
        assert found[position].item() == pytest.approx((values[0] - values[1]).item() / 2e-5, rel=1e-5, abs=1e-8)


def test_int8_rotary_tables_cost_a_small_error_in_every_layer():
    shape = replace(TINY, layers=6)
    weights = random_weights(shape, 2, device=CPU, dtype=torch.float32)
    tokens = torch.randint(0, shape.vocab, (100,), generator=torch.Generator().manual_seed(1))
    assert layer_errors(shape, shape, weights, tokens) == [0.0] * 6
    errors = layer_errors(shape, replace(shape, rope_table="int8"), weights, tokens)
    # A table entry is off by at most 1/254; attention averages the errors of many entries.
    assert len(errors) == 6 and all(0 < e < 1 / 127 for e in errors)


def test_a_wider_alibi_band_is_nearer_to_no_band():
    full = replace(TINY, positions="alibi", layers=3)
    weights = random_weights(full, 2, device=CPU, dtype=torch.float32)
    tokens = torch.randint(0, full.vocab, (100,), generator=torch.Generator().manual_seed(1))
    last = [layer_errors(full, replace(full, window=band), weights, tokens)[-1] for band in (4, 16, 64, 100)]
    assert last[0] > last[1] > last[2] > last[3] == 0.0


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12).tolist()[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_dense_attention_refuses_what_needs_a_cache():
    with pytest.raises(ValueError, match="whole sequences"):
        runner(attention="dense").execute(StepInput([SequenceInput(1, [3], 4, [1, 2])]))
