"""Every Triton kernel, in the interpreter, against float64 arithmetic written here; and compiled ahead of time for two architectures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("triton", reason="the engine's extra is not installed")

from engine.kernels import aot, decode_attention, pointwise, prefill_attention, reference
from engine.kernels import chosen as chosen_kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}


def error(found, expected) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def pages(g, *, sequences, context, block_tokens, kv_heads, dim, dtype):
    """Random caches, a table of shuffled blocks, and each sequence's keys and values gathered one by one in float64."""
    columns = -(-max(context) // block_tokens)
    blocks = sequences * columns + 1
    table = (torch.randperm(blocks - 1, generator=g)[: sequences * columns] + 1).view(sequences, columns).to(torch.int32)
    keys, values = (torch.randn(blocks, block_tokens, kv_heads, dim, generator=g).to(dtype) for _ in range(2))

    def row(cache, s):
        return torch.stack([cache[table[s, t // block_tokens], t % block_tokens] for t in range(context[s])]).double()

    return keys, values, table, [row(keys, s) for s in range(sequences)], [row(values, s) for s in range(sequences)]


def attend(query, k, v, position, window, slopes):
    """One query [H, D] at ``position`` against k, v [L, K, D]; head by head."""
    heads, dim = query.shape
    group = heads // k.shape[1]
    out = []
    for h in range(heads):
        low = max(0, position + 1 - window) if window else 0
        score = k[low : position + 1, h // group] @ query[h].double() / math.sqrt(dim)
        if slopes is not None:
            score = score + slopes[h].double() * (torch.arange(low, position + 1) - position)
        out.append(torch.softmax(score, 0) @ v[low : position + 1, h // group])
    return torch.stack(out)


#           heads kv dim block_tokens window alibi dtype
CASES = [
    (8, 2, 16, 4, 0, False, torch.float32),
    (4, 4, 32, 16, 0, False, torch.float32),
    (6, 1, 24, 5, 0, False, torch.float32),
    (8, 2, 16, 16, 11, False, torch.float32),
    (4, 2, 16, 8, 20, True, torch.float32),
    (8, 2, 64, 16, 0, False, torch.bfloat16),
]


@pytest.mark.parametrize("heads, kv_heads, dim, block_tokens, window, alibi, dtype", CASES)
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_decode_attention(heads, kv_heads, dim, block_tokens, window, alibi, dtype, multiprocessors):
    g = torch.Generator().manual_seed(dim + heads)
    context = [70, 1, 37]
    keys, values, table, k, v = pages(g, sequences=3, context=context, block_tokens=block_tokens, kv_heads=kv_heads, dim=dim, dtype=dtype)
    wide = torch.randn(3, heads + 3, dim, generator=g).to(dtype)
    q, slopes = wide[:, :heads], torch.rand(heads, generator=g) if alibi else None
    rows, length = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor(context, dtype=torch.int32)
    shuffled = torch.empty_like(table)
    shuffled[rows.long()] = table
    tuning = decode_attention.DecodeTuning(block_n=16, resident=1, waves=2)
    workspace = decode_attention.DecodeWorkspace(3, heads, kv_heads, dim, multiprocessors, torch.device("cpu"), tuning)
    workspace.cut(length)
    found = decode_attention.decode_attention(q, keys, values, shuffled, rows, length, workspace, scale=dim**-0.5, window=window, slopes=slopes)
    expected = torch.stack([attend(q[s], k[s], v[s], context[s] - 1, window, slopes) for s in range(3)])
    assert error(found, expected) < TOLERANCE[dtype]
    plain = reference.decode_attention(
        q.float(), keys.float(), values.float(), table, length, max_context=70, scale=dim**-0.5, window=window, slopes=slopes
    )
    assert error(plain, expected) < 2e-6
    assert workspace.splits(3) > 1 or multiprocessors == 1


def test_scores_beyond_the_range_of_an_exponential_are_merged_over_splits():
    g = torch.Generator().manual_seed(3)
    keys, values, table, k, v = pages(g, sequences=1, context=[90], block_tokens=4, kv_heads=1, dim=16, dtype=torch.float32)
    q = 150 * torch.randn(1, 2, 16, generator=g)
    assert (k[0][:, 0] @ q[0, 0].double()).max() / 4 > 200
    workspace = decode_attention.DecodeWorkspace(1, 2, 1, 16, 8, torch.device("cpu"), decode_attention.DecodeTuning(block_n=16))
    length = torch.tensor([90], dtype=torch.int32)
    workspace.cut(length)
    assert workspace.split_tokens < 90
    found = decode_attention.decode_attention(q, keys, values, table, torch.zeros(1, dtype=torch.int32), length, workspace, scale=0.25)
    assert error(found, attend(q[0], k[0], v[0], 89, 0, None)[None]) < 1e-5


@pytest.mark.parametrize("heads, kv_heads, dim, block_tokens, window, alibi, dtype", CASES)
def test_prefill_attention(heads, kv_heads, dim, block_tokens, window, alibi, dtype):
    g = torch.Generator().manual_seed(dim + heads)
    chunks = [(21, 30), (1, 0), (9, 0)]  # new tokens, tokens before
    context = [new + before for new, before in chunks]
    keys, values, table, k, v = pages(g, sequences=3, context=context, block_tokens=block_tokens, kv_heads=kv_heads, dim=dim, dtype=dtype)
    starts = torch.tensor([0, 21, 22, 31], dtype=torch.int32)
    q, slopes = torch.randn(31, heads, dim, generator=g).to(dtype), torch.rand(heads, generator=g) if alibi else None
    tuning = prefill_attention.PrefillTuning(block_m=32, block_n=16)
    found = prefill_attention.prefill_attention(
        q, keys, values, table, torch.arange(3, dtype=torch.int32), torch.tensor(context, dtype=torch.int32), starts, 21,
        scale=dim**-0.5, window=window, slopes=slopes, tuning=tuning,
    )  # fmt: skip
    for s, (_, before) in enumerate(chunks):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        expected = torch.stack([attend(row, k[s], v[s], before + i, window, slopes) for i, row in enumerate(q[rows])])
        assert error(found[rows], expected) < TOLERANCE[dtype]
        plain = reference.prefill_attention(
            q[rows].float(), keys.float(), values.float(), table[s], before, scale=dim**-0.5, window=window, slopes=slopes
        )
        assert error(plain, expected) < 2e-6


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [32, 33])
def test_rmsnorm_with_and_without_residual(dtype, width):
    g = torch.Generator().manual_seed(width)
    x, residual = (torch.randn(5, width, generator=g).to(dtype) for _ in range(2))
    weight = torch.rand(width, generator=g).to(dtype)

    def norm(row):
        return row / (row.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    total = (x.double() + residual.double()).to(dtype)
    for ops in (reference, pointwise):
        assert error(ops.rmsnorm(x, weight, 1e-5), norm(x.double())) < TOLERANCE[dtype]
        out, kept = ops.add_rmsnorm(x, residual.clone(), weight, 1e-5)
        assert error(kept, total) < TOLERANCE[dtype]
        assert error(out, norm(total.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("table", ["float32", "int8"])
@pytest.mark.parametrize("dim", [16, 24])
def test_rope_rotates_pairs_in_a_strided_view(dim, table):
    g = torch.Generator().manual_seed(dim)
    qkv = torch.randn(6, 7, dim, generator=g)
    positions = torch.tensor([0, 3, 9, 9, 1, 30], dtype=torch.int32)
    angles = torch.outer(torch.arange(31).double(), 100.0 ** -(torch.arange(dim // 2).double() / (dim // 2)))
    cos, sin = angles.cos(), angles.sin()
    if table == "int8":
        cos, sin = ((127 * t).round().to(torch.int8) for t in (cos, sin))
    else:
        cos, sin = cos.float(), sin.float()
    pairs = torch.complex(qkv[:, :5, : dim // 2].double(), qkv[:, :5, dim // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[positions.long()][:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    limit = 2e-6 if table == "float32" else 1 / 127
    assert error(reference.rope(qkv[:, :5], positions, cos, sin), expected) < limit
    untouched = qkv[:, 5:].clone()
    assert error(pointwise.rope(qkv[:, :5], positions, cos, sin), expected) < limit
    assert torch.equal(qkv[:, 5:], untouched)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 23])
def test_experts_skip_what_is_dropped_and_never_read_what_nobody_chose(rows, dtype):
    g = torch.Generator().manual_seed(rows)
    experts, hidden, width = 6, 40, 24
    x = torch.randn(rows, hidden, generator=g).to(dtype)
    gate_up, down = (torch.randn(experts, *size, generator=g).to(dtype) * 0.3 for size in ((2 * width, hidden), (hidden, width)))
    chosen = torch.stack([torch.randperm(experts - 1, generator=g)[:2] for _ in range(rows)])
    chosen[torch.rand(rows, 2, generator=g) < 0.3] = -1
    chosen[rows // 2 :: 3] = -1
    share = torch.rand(rows, 2, generator=g).masked_fill(chosen < 0, 0).to(dtype)
    gate_up[experts - 1], down[experts - 1] = float("nan"), float("nan")  # nobody's
    x[(chosen < 0).all(1)] = float("nan")
    # Three products one after the other, each rounded.
    expected = torch.zeros(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        for expert, part in zip(chosen[row].tolist(), share[row].double()):
            if expert >= 0:
                gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
                expected[row] += part * (down[expert].double() @ (gate / (1 + torch.exp(-gate)) * up))
    for module in (reference, chosen_kernels):
        found = module.experts(x, gate_up, down, chosen, share, fixed=False)
        assert error(found, expected) < 2 * TOLERANCE[dtype] or not expected.any()
        assert not found[(chosen < 0).all(1)].any()
    whole = reference.experts(x.nan_to_num(), gate_up.nan_to_num(), down.nan_to_num(), chosen, share, fixed=True)
    assert error(whole, expected) < 2 * TOLERANCE[dtype] or not expected.any()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype):
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    for ops in (reference, pointwise):
        assert error(ops.silu_mul(x), gate / (1 + torch.exp(-gate)) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kv_write_touches_only_its_slots(dtype):
    g = torch.Generator().manual_seed(2)
    qkv = torch.randn(4, 9, 8, generator=g).to(dtype)
    slots = torch.tensor([7, 0, 13, 4], dtype=torch.int32)
    for write in (reference.kv_write, pointwise.kv_write):
        keys, values = torch.full((5, 4, 3, 8), 7.0, dtype=dtype), torch.full((5, 4, 3, 8), 7.0, dtype=dtype)
        write(qkv[:, 3:6], qkv[:, 6:], keys, values, slots)
        assert torch.equal(keys.view(20, 3, 8)[slots.long()], qkv[:, 3:6])
        assert torch.equal(values.view(20, 3, 8)[slots.long()], qkv[:, 6:])
        assert (keys == 7.0).sum() == 16 * 24 and (values == 7.0).sum() == 16 * 24


def test_the_grid_depends_on_the_batch_alone_and_the_cut_covers_every_context():
    tuning = decode_attention.DecodeTuning()
    for batch in (1, 2, 8, 64, 256):
        splits = decode_attention.max_splits(batch, 8, 132, tuning)
        workspace = decode_attention.DecodeWorkspace(batch, 8, 8, 16, 132, torch.device("cpu"), tuning)
        for lengths in ([8192] * batch, [1] * batch, [16] * (batch - 1) + [100_000]):
            workspace.cut(torch.tensor(lengths, dtype=torch.int32))
            span = int(workspace.split_tokens)
            assert span % tuning.block_n == 0 and splits * span >= max(lengths)
    assert decode_attention.max_splits(256, 8, 132, tuning) < decode_attention.max_splits(8, 8, 132, tuning)


def test_kernels_compile_for_two_architectures_without_spilling():
    """In a process of its own: this one runs the interpreter."""
    if aot.missing_tool():
        pytest.skip(f"Triton's wheel has no {aot.missing_tool()}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(aot.__file__).parents[2]
    command = [sys.executable, "-m", "engine.kernels.aot", "--json"]
    rows = json.loads(subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert {(r["kernel"], r["arch"]) for r in rows} == {(s.name, arch) for arch in aot.ARCHITECTURES for s in aot.specimens(arch)}
    shared_limit = {80: 163 * 1024, 90: 227 * 1024}
    for r in rows:
        assert r["spill_bytes"] == 0 and r["shared_bytes"] <= shared_limit[r["arch"]], r
    units = {(r["kernel"], r["arch"]): r["tensor_core"] for r in rows}
    assert units["decode_attention", 90] == "mma" and units["prefill_attention", 90] == "wgmma" and units["prefill_attention", 80] == "mma"
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        aot.report()
