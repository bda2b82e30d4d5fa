"""Narrow KV pages: what comes back of what was stored, bytes, and the error they leave in the logits of a whole network."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from stub_plans import CPU, TINY, generate, runner

from engine.kv_formats import NarrowPages
from engine.loader import random_weights
from serving.errors import InputError

WIDE = replace(TINY, hidden=64, heads=4, kv_heads=2, head_dim=64)


def pages(kind: str, dim: int = 96) -> NarrowPages:
    return NarrowPages(kind, (5, 4, 2, dim), torch.float32, CPU)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(["fp8", "int8", "int4"]), st.integers(0, 1000), st.floats(1e-3, 100.0), st.sampled_from([2, 16, 64, 96, 128]))
def test_a_value_comes_back_within_half_a_step(kind, seed, size, dim):
    x = torch.randn(7, 2, dim, generator=torch.Generator().manual_seed(seed)) * size
    kept = pages(kind, dim)
    slots = torch.tensor([4, 5, 6, 7, 11, 12, 19])
    kept.store(x, slots)
    back = kept.index_select(0, torch.arange(5)).flatten(0, 1)[slots]
    if kind == "fp8":  # 3 bits of mantissa, subnormal below 2^-6
        assert ((back - x.clamp(-448, 448)).abs() <= x.abs() / 16 + 2**-10).all()
    else:
        group = min(64, dim) if kind == "int4" else dim
        largest = torch.nn.functional.pad(x.abs(), (0, -dim % group)).unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)[..., :dim]
        step = largest / (127 if kind == "int8" else 7)
        assert ((back - x).abs() <= step * 0.5 + largest * 2**-8 + 1e-7).all(), "half a step, and the rounding of a bf16 scale"


def test_bytes_are_those_of_the_table():
    tokens, heads = 20, 2
    assert pages("fp8").nbytes == tokens * heads * 96
    assert pages("int8").nbytes == tokens * heads * (96 + 2)
    assert pages("int4").nbytes == tokens * heads * (48 + 2 * 2)


def test_raw_pages_move_bit_for_bit():
    for kind in ("fp8", "int8", "int4"):
        kept = pages(kind)
        kept.store(torch.randn(4, 2, 96), torch.arange(4, 8))
        kept.put_raw(torch.tensor([3]), kept.raw(torch.tensor([1])))
        assert torch.equal(kept[torch.tensor([3])], kept[torch.tensor([1])])


def errors(kind: str | None, attention: str = "torch") -> float:
    weights = random_weights(WIDE, 4, device=CPU, dtype=torch.float32)
    asked = {10 + i: [random.Random(i).randrange(WIDE.vocab) for _ in range(40)] for i in range(3)}
    logits = []
    for options in ({"attention": "torch"}, {"attention": attention, "kv_format": kind}):
        engine = runner(WIDE, weights=weights, blocks=80, **options)
        _, seen = generate(engine, asked, 1, random.Random(1))
        logits.append(torch.stack([row.float() for request in sorted(seen) for _, row in sorted(seen[request].items())]))
    exact, rounded = logits
    return float((rounded - exact).square().mean().sqrt() / exact.std())


def test_the_error_in_the_logits_is_bounded_and_ordered():
    fp8, int8, int4, query = errors("fp8"), errors("int8"), errors("int4"), errors(None, "fp8_query")
    assert 0 < int8 < fp8 < int4
    assert int8 < 0.02 and fp8 < 0.05 and int4 < 0.25
    assert 0 < query < 0.05


def test_preempted_and_recomputed_sequences_say_the_same_on_narrow_pages():
    weights = random_weights(TINY, 4, device=CPU, dtype=torch.float32)
    asked = {1: list(range(1, 20)), 2: list(range(5, 40))}
    said = [generate(runner(weights=weights, kv_format="int8"), asked, 6, random.Random(seed), preempt=share)[0] for seed, share in ((1, 0.0), (2, 0.3))]
    assert said[0] == said[1]


def test_what_cannot_be_is_named():
    with pytest.raises(InputError, match="int8"):
        NarrowPages("int9", (2, 1, 1, 2), torch.float32, CPU)
    with pytest.raises(InputError, match="triton"):
        runner(attention="triton", kv_format="fp8")
