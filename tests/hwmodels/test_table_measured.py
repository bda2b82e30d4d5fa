"""The table model on real profiles: held-out grid points, agreement with the cells, speed, and sane figures for whole steps."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hwmodels.profiles.columns import read_columns
from hwmodels.profiles.grid import fill
from hwmodels.profiles.layerwise import ATTENTION_AXES
from hwmodels.table import build
from serving import catalog
from serving.errors import InputError
from serving.plan import StepShape

PROFILES = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000-server"}
OPERATORS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "a100_sxm": "a100-sxm-80gb"}
LLAMA_8B = "meta-llama/Llama-3.1-8B"


def profile(data_dir, name):
    return data_dir / "profiles" / name / LLAMA_8B / "bf16"


def layerwise(data_dir, name, **options):
    gpu = catalog.load_gpu(PROFILES[name])
    return build({"profile": str(profile(data_dir, name)), **options}, llm=catalog.load_llm("llama-3.1-8b"), gpu=gpu)


def operators(data_dir, name, llm="llama-3.1-8b", tensor_parallel=1):
    folder = data_dir / "measured" / "aiconfigurator_sample" / name
    return build({"profile": str(folder)}, llm=catalog.load_llm(llm), gpu=catalog.load_gpu(OPERATORS[name]), tensor_parallel=tensor_parallel)


def multilinear(axes, times, point):
    """An independent interpolation, corner by corner."""
    total = 0.0
    cells = [min(max(int(np.searchsorted(axis, x, side="right")) - 1, 0), len(axis) - 2) for axis, x in zip(axes, point)]
    weights = [max(0.0, (x - axis[i]) / (axis[i + 1] - axis[i])) for axis, x, i in zip(axes, point, cells)]
    for corner in range(2 ** len(axes)):
        sides = [(corner >> k) & 1 for k in range(len(axes))]
        share = np.prod([w if side else 1 - w for w, side in zip(weights, sides)])
        total += share * times[tuple(i + side for i, side in zip(cells, sides))]
    return total


@pytest.mark.parametrize("name", PROFILES)
def test_interpolation_predicts_points_held_out_of_the_decode_grid(data_dir, name):
    """Drop every second inner KV length, then every second batch, and predict them from the rest."""
    table = read_columns(profile(data_dir, name) / "tp1" / "attention.csv", axes=ATTENTION_AXES, times=("time_us",))
    rows = (table.numbers["prefill_chunk"] == 0) & (table.numbers["n_decode"] > 0)
    points = np.stack([table.numbers["n_decode"][rows], table.numbers["kv_decode"][rows]], axis=1)
    times = table.numbers["time_us"][rows]
    for axis, median_limit in ((1, 0.02), (0, 0.06)):
        held_out = np.isin(points[:, axis], np.unique(points[:, axis])[1:-1:2])
        axes, grid = fill(points[~held_out], times[~held_out])
        errors = [multilinear(axes, grid, p) / t - 1 for p, t in zip(points[held_out], times[held_out])]
        assert np.median(np.abs(errors)) < median_limit


def test_interpolation_predicts_mixed_batches_held_out(data_dir):
    """The RTX PRO 6000 profile is a union of two grids: predict the second from the first."""
    table = read_columns(profile(data_dir, "RTXPRO6000") / "tp1" / "attention.csv", axes=ATTENTION_AXES, times=("time_us",))
    points = np.stack([table.numbers[name] for name in ATTENTION_AXES], axis=1)
    mixed = (points[:, 0] > 0) & (points[:, 2] > 0)
    powers = [0, *(2**k for k in range(15))]
    first = mixed & np.isin(points, powers).all(axis=1)
    second = np.flatnonzero(mixed & ~first)[::20]
    axes, grid = fill(points[first], table.numbers["time_us"][first])
    errors = np.array([multilinear(axes, grid, points[row]) / table.numbers["time_us"][row] - 1 for row in second])
    assert np.median(np.abs(errors)) < 0.02
    assert abs(errors.mean()) < 0.01


@pytest.mark.parametrize("name", PROFILES)
def test_measured_cells_come_back(data_dir, name):
    model = layerwise(data_dir, name)
    table = read_columns(profile(data_dir, name) / "tp1" / "attention.csv", axes=ATTENTION_AXES, times=("time_us",))
    for row in range(0, table.rows, 97):
        chunk, before, decodes, kv = (int(table.numbers[axis][row]) for axis in ATTENTION_AXES)
        us = 32 * table.numbers["time_us"][row]
        if chunk:
            assert model._kernels.mixed_attention_s(chunk, before, decodes, kv) == pytest.approx(us * 1e-6, rel=1e-9)
        else:
            knots, times_s = model._kernels.decode_attention(decodes)
            assert times_s[knots.index(kv)] == pytest.approx(us * 1e-6, rel=1e-9)


@pytest.mark.parametrize("name", PROFILES)
def test_decode_steps_are_quick_and_runs_quicker(data_dir, name):
    """A ratio to a fixed loop in the same process, for the machine's speed swings."""
    model = layerwise(data_dir, name, skew=False)
    shape = StepShape((), 32, 32 * 1000, 32)
    model.step_s(shape)
    reference, decode, run = [], [], []
    for _ in range(5):
        start = time.process_time()
        total = 0.0
        for i in range(20000):
            total += i * 0.5
        reference.append(time.process_time() - start)
        start = time.process_time()
        for _ in range(20000):
            model.step_s(shape)
        decode.append(time.process_time() - start)
        start = time.process_time()
        model.run_s(shape, 20000)
        run.append(time.process_time() - start)
    assert min(decode) < 40 * min(reference)
    assert min(run) < min(decode)


@pytest.mark.parametrize(("name", "llm", "tensor_parallel"), [
    ("h100_sxm", "llama-3.1-8b", 1), ("h100_sxm", "llama-3.1-70b", 4), ("h200_sxm", "qwen3-32b", 8), ("a100_sxm", "llama-3.1-70b", 2),
])  # fmt: skip
def test_no_step_beats_the_datasheet(data_dir, name, llm, tensor_parallel):
    model, shape_of, gpu = operators(data_dir, name, llm, tensor_parallel), catalog.load_llm(llm), catalog.load_gpu(OPERATORS[name])
    weights = shape_of.weight_bytes(tensor_parallel=tensor_parallel)
    embedding = 2 * shape_of.vocab * shape_of.hidden // tensor_parallel
    kv = shape_of.kv_bytes_per_token(tensor_parallel=tensor_parallel)
    for decodes, mean in ((1, 100), (16, 4000), (256, 1000)):
        moved = weights - embedding + decodes * mean * kv
        assert model.step_s(StepShape((), decodes, decodes * mean, decodes)) > moved / gpu.memory_bytes_per_s
    linear = shape_of.parameters()
    flops = 2 * 4096 * (linear.attention + linear.mlp) / tensor_parallel
    assert model.step_s(StepShape(((4096, 0),), 0, 0, 1)) > flops / gpu.peak_flops("bf16")


def test_a_cached_prefix_costs_the_rest_of_the_triangle(data_dir):
    """Chunks of one prompt cost what the prompt costs and up to 10 % more, and a later chunk costs more than an earlier one."""
    model = operators(data_dir, "h100_sxm")
    pieces = [model._kernels.mixed_attention_s(2048, before, 0, 0.0) for before in range(0, 8192, 2048)]
    assert pieces == sorted(pieces)
    assert 1.0 <= sum(pieces) / model._kernels.mixed_attention_s(8192, 0, 0, 0.0) < 1.1


def test_degrees_and_devices_that_were_not_measured_are_refused(data_dir):
    with pytest.raises(InputError, match=r"tensor_parallel 16 was not measured.*can answer for: 1, 2, 4, 8"):
        operators(data_dir, "h100_sxm", "llama-3.1-70b", 16)
    with pytest.raises(InputError, match="head_dim 128"):
        operators(data_dir, "h100_sxm", "phi-3.5-mini")
    with pytest.raises(InputError, match=r"tensor_parallel 2 was not profiled.*can answer for: 1"):
        build({"profile": str(profile(data_dir, "RTX4090"))}, llm=catalog.load_llm("llama-3.1-8b"), gpu=catalog.load_gpu("rtx-4090"), tensor_parallel=2)
    with pytest.raises(InputError, match="num_attention_heads"):
        build({"profile": str(profile(data_dir, "RTX4090"))}, llm=catalog.load_llm("qwen3-32b"), gpu=catalog.load_gpu("rtx-4090"))
    with pytest.raises(InputError, match="16-bit KV cache"):
        build({"profile": str(profile(data_dir, "RTX4090"))}, llm=catalog.load_llm("llama-3.1-8b"), gpu=catalog.load_gpu("rtx-4090"), kv_dtype="fp8")


def test_skew_comes_from_the_profile_and_the_gpu(data_dir):
    """It is used unasked where meta.yaml says that it belongs to the profile. RTX 4090: 128 SMs and 8 KV heads, so the kernel stops splitting sequences from 26 decodes on."""
    assert layerwise(data_dir, "RTXPRO6000").needs_contexts and not layerwise(data_dir, "RTX4090").needs_contexts
    skew = layerwise(data_dir, "RTX4090", skew=True)._skew
    assert skew.split_limit == pytest.approx(25.6)
    assert skew.alpha(0, 0, 16, 2) < 0.06 < skew.alpha(0, 0, 27, 3)
    assert skew.alpha(256, 0, 64, 8) > 2 * skew.alpha(256, 8192, 64, 8)
