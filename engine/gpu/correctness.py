"""Every kernel on fresh random inputs against float64 arithmetic, at shapes in use and at awkward ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.gpu.timing import relative_error
from engine.kernels import chosen, decode_attention, pointwise, prefill_attention, reference
from engine.kernels.interpreting import INTERPRETING
from engine.loader import random_weights
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.two_streams import TwoStreams

#: Relative errors that rounding explains; beyond them a kernel is wrong.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}


class Shape(NamedTuple):
    """Attention over pages: heads, sequences with their cached tokens, a window (0: none), whether positions are biased (ALiBi)."""

    heads: int
    kv_heads: int
    dim: int
    block_tokens: int
    context: tuple[int, ...]
    window: int = 0
    alibi: bool = False
    dtype: torch.dtype = torch.bfloat16


class Check(NamedTuple):
    """One comparison. ``error`` is relative, infinite for results that are not finite."""

    kernel: str
    shape: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= self.limit


class Pages(NamedTuple):
    """A paged cache: keys and values [blocks, block_tokens, kv_heads, dim], a table of shuffled blocks, contexts."""

    keys: Tensor
    values: Tensor
    table: Tensor
    context: Tensor


LARGE = (
    Shape(32, 8, 128, 16, (8192, 1, 4097, 37, 2048, 16, 6000, 511)),
    Shape(32, 8, 128, 16, tuple(range(100, 1700, 25))),
    Shape(64, 8, 128, 32, (3000, 2999)),
    Shape(32, 32, 128, 16, (777, 1024)),
    Shape(12, 2, 64, 16, (300, 5, 129), dtype=torch.float32),
    Shape(6, 1, 96, 8, (70, 1000), dtype=torch.float32),
    Shape(32, 8, 128, 16, (5000, 4095), window=4096),
    Shape(8, 2, 64, 16, (900, 33), window=200, alibi=True, dtype=torch.float32),
)
SMALL = (Shape(8, 2, 32, 8, (70, 1, 33)), Shape(6, 1, 24, 5, (40, 9), window=11, alibi=True, dtype=torch.float32))


def random_pages(shape: Shape, device: torch.device, g: torch.Generator) -> Pages:
    """Fresh random pages; every sequence has blocks of its own, in no order."""
    columns = -(-max(shape.context) // shape.block_tokens)
    sequences = len(shape.context)
    blocks = sequences * columns + 1
    size = (blocks, shape.block_tokens, shape.kv_heads, shape.dim)
    keys, values = (torch.randn(size, generator=g, device=device).to(shape.dtype) for _ in range(2))
    table = (torch.randperm(blocks - 1, generator=g, device=device) + 1).view(sequences, columns).to(torch.int32)
    return Pages(keys, values, table, torch.tensor(shape.context, dtype=torch.int32, device=device))


def check_decode(shape: Shape, device: torch.device, g: torch.Generator, tuning: decode_attention.DecodeTuning, multiprocessors: int) -> Check:
    """Decode attention of one shape."""
    pages, sequences = random_pages(shape, device, g), len(shape.context)
    q = torch.randn(sequences, shape.heads, shape.dim, generator=g, device=device).to(shape.dtype)
    slopes = torch.rand(shape.heads, generator=g, device=device) if shape.alibi else None
    workspace = decode_attention.DecodeWorkspace(sequences, shape.heads, shape.kv_heads, shape.dim, multiprocessors, device, tuning)
    workspace.cut(pages.context)
    rows = torch.arange(sequences, dtype=torch.int32, device=device)
    found = decode_attention.decode_attention(
        q, pages.keys, pages.values, pages.table, rows, pages.context, workspace, scale=shape.dim**-0.5, window=shape.window, slopes=slopes
    )
    expected = torch.cat([
        reference.decode_attention(
            q[s : s + 1].double(), pages.keys.double(), pages.values.double(), pages.table[s : s + 1], pages.context[s : s + 1],
            max_context=shape.context[s], scale=shape.dim**-0.5, window=shape.window, slopes=None if slopes is None else slopes.double(),
        )
        for s in range(sequences)
    ])  # fmt: skip
    return Check("decode_attention", f"{_name(shape)} {tuple(tuning)}", relative_error(found, expected), TOLERANCE[shape.dtype])


def check_prefill(shape: Shape, device: torch.device, g: torch.Generator) -> Check:
    """Prefill attention: of each context the later half is new."""
    pages = random_pages(shape, device, g)
    chunks = [(context - context // 2, context // 2) for context in shape.context]
    tokens = sum(new for new, _ in chunks)
    q = torch.randn(tokens, shape.heads, shape.dim, generator=g, device=device).to(shape.dtype)
    slopes = torch.rand(shape.heads, generator=g, device=device) if shape.alibi else None
    starts = torch.tensor([0, *(new for new, _ in chunks)], device=device).cumsum(0).to(torch.int32)
    rows = torch.arange(len(chunks), dtype=torch.int32, device=device)
    found = prefill_attention.prefill_attention(
        q, pages.keys, pages.values, pages.table, rows, pages.context, starts, max(new for new, _ in chunks), scale=shape.dim**-0.5,
        window=shape.window, slopes=slopes, tuning=prefill_tuned_for(device),
    )  # fmt: skip
    bounds = starts.tolist()
    expected = torch.cat([
        reference.prefill_attention(
            q[bounds[s] : bounds[s + 1]].double(), pages.keys.double(), pages.values.double(), pages.table[s], before, scale=shape.dim**-0.5,
            window=shape.window, slopes=None if slopes is None else slopes.double(),
        )
        for s, (_, before) in enumerate(chunks)
    ])  # fmt: skip
    return Check("prefill_attention", _name(shape), relative_error(found, expected), TOLERANCE[shape.dtype])


def check_pointwise(device: torch.device, g: torch.Generator, dtype: torch.dtype, tokens: int, width: int) -> Iterator[Check]:
    """Norm with residual, SwiGLU product, rotation, write to pages."""
    limit, shape = TOLERANCE[dtype], f"{tokens} x {width} {_short(dtype)}"
    x, residual = (torch.randn(tokens, width, generator=g, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(width, generator=g, device=device).to(dtype)
    out, kept = pointwise.add_rmsnorm(x, residual.clone(), weight, 1e-5)
    total = (x.double() + residual.double()).to(dtype)
    yield Check("add_rmsnorm", shape, relative_error(out, reference.rmsnorm(total.double(), weight.double(), 1e-5)), limit)
    yield Check("add_rmsnorm residual", shape, relative_error(kept, total), 0.0 if dtype == torch.float32 else limit)
    gate_up = torch.randn(tokens, 2 * width, generator=g, device=device).to(dtype)
    yield Check("silu_mul", shape, relative_error(pointwise.silu_mul(gate_up), reference.silu_mul(gate_up.double())), limit)
    dim = 64
    heads = torch.randn(tokens, max(1, width // dim), dim, generator=g, device=device).to(dtype)
    positions = torch.randint(0, 4096, (tokens,), generator=g, device=device).to(torch.int32)
    angles = torch.outer(torch.arange(4096, device=device).double(), 10000.0 ** -(torch.arange(dim // 2, device=device).double() / (dim // 2)))
    expected = reference.rope(heads.double(), positions, angles.cos(), angles.sin())
    yield Check("rope", shape, relative_error(pointwise.rope(heads.clone(), positions, angles.cos().float(), angles.sin().float()), expected), max(limit, 1e-5))
    keys, values = (torch.full((tokens + 1, 4, *heads.shape[1:]), 7.0, dtype=dtype, device=device) for _ in range(2))
    slots = torch.randperm(4 * tokens, generator=g, device=device)[:tokens].to(torch.int32)
    pointwise.kv_write(heads, heads * 2, keys, values, slots)
    plain_keys, plain_values = torch.full_like(keys, 7.0), torch.full_like(values, 7.0)
    reference.kv_write(heads, heads * 2, plain_keys, plain_values, slots)
    same = torch.equal(keys, plain_keys) and torch.equal(values, plain_values)
    yield Check("kv_write", shape, 0.0 if same else float("inf"), 0.0)


def check_chosen(device: torch.device, g: torch.Generator, dtype: torch.dtype, rows: int, width: int) -> Iterator[Check]:
    """Rows that choose their matrix: adapters by slot and experts by a router, some rows choosing nothing."""
    slots, rank, limit = 7, 16, TOLERANCE[dtype]
    widths = (width, width // 4, width // 4)

    def normal(*size: int) -> Tensor:
        return (torch.randn(*size, generator=g, device=device) * size[-1] ** -0.5).to(dtype)

    x, y = normal(rows, width) * width**0.5, normal(rows, sum(widths))
    a, b = normal(slots, 3 * rank, width), normal(slots, sum(widths), rank)
    adapters = torch.randint(-1, slots, (rows,), generator=g, device=device, dtype=torch.int32)
    expected, found = y.double(), y.clone()
    reference.add_adapters(expected, x.double(), a.double(), b.double(), widths, adapters)
    chosen.add_adapters(found, x, a, b, widths, adapters)
    yield Check("adapters", f"{rows} x {width} of {slots} {_short(dtype)}", relative_error(found, expected), limit)
    gate_up, down = normal(slots, width, width), normal(slots, width, width // 2)
    choice = torch.rand(rows, slots, generator=g, device=device).topk(2).indices
    choice[torch.rand(rows, 2, generator=g, device=device) < 0.2] = -1
    share = torch.rand(rows, 2, generator=g, device=device).masked_fill(choice < 0, 0).to(dtype)
    expected = reference.experts(x.double(), gate_up.double(), down.double(), choice, share.double(), fixed=False)
    found = chosen.experts(x, gate_up, down, choice, share, fixed=False)
    yield Check("experts", f"{rows} x {width} of {slots} {_short(dtype)}", relative_error(found, expected), 2 * limit)


def check_engine(device: torch.device, seed: int, steps: int) -> Check:
    """Greedy tokens of a small float32 network: Triton kernels and captured graphs against torch, run eagerly."""
    shape = Architecture(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=300, max_model_len=256)
    weights = random_weights(shape, seed, device=device, dtype=torch.float32)
    texts = []
    for attention, ops, sizes in (("triton", "triton", (1, 2, 4)), ("torch", "torch", ())):
        # The first also runs prompts and decodes of one step on two streams.
        options = RunnerOptions(blocks=64, max_seqs=4, max_batch_tokens=128, graph_sizes=sizes, attention=attention, ops=ops, seed=seed)
        runner = Runner(shape, weights, options)
        runner = TwoStreams(runner) if sizes else runner
        runner.warm_up()
        texts.append(_greedy(runner, [list(range(2, 2 + n)) for n in (33, 5, 18)], steps))
    wrong = sum(a != b for left, right in zip(*texts) for a, b in zip(left, right))
    return Check("engine, triton and graphs", f"3 x {steps} greedy tokens", wrong / (3 * steps), 0.0)


def _greedy(runner: Runner | TwoStreams, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Each prompt begins a step after the one before it, beside its decodes."""
    width = runner.options.block_tokens
    tables = [list(range(1 + 8 * one, 9 + 8 * one)) for one in range(len(prompts))]
    texts: list[list[int]] = [[] for _ in prompts]
    for step in range(steps + len(prompts) - 1):
        batch, running = [], [one for one in range(len(prompts)) if one <= step < one + steps]
        for one in running:
            begun = len(texts[one])
            start = len(prompts[one]) + begun - 1 if begun else 0
            tokens = texts[one][-1:] or prompts[one]
            batch.append(SequenceInput(one, tokens, start, tables[one][: -(-(start + len(tokens)) // width)]))
        decodes = sum(len(texts[one]) > 0 for one in running)
        out = runner.execute(StepInput(batch, beside=decodes if 0 < decodes < len(batch) else None))
        for one in running:
            texts[one].append(out.tokens[one][0])
    return texts


def checks(device: torch.device, seed: int, *, small: bool) -> Iterator[Check]:
    """All of them."""
    g = torch.Generator(device=device).manual_seed(seed)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    for shape in SMALL if small else LARGE:
        yield check_decode(shape, device, g, tuned_for(device), multiprocessors)
        yield check_prefill(shape, device, g)
    for dtype in TOLERANCE:
        yield from check_pointwise(device, g, dtype, *((5, 128) if small else (257, 4096)))
        yield from check_chosen(device, g, dtype, *((5, 64) if small else (257, 2048)))
    yield check_engine(device, seed, 2 if INTERPRETING else 24)


def tuned_for(device: torch.device) -> decode_attention.DecodeTuning:
    """The setting that the engine would take."""
    if device.type != "cuda":
        return decode_attention.DecodeTuning(block_n=16, resident=1, waves=2)
    return decode_attention.decode_tuning(torch.cuda.get_device_properties(device).major)


def prefill_tuned_for(device: torch.device) -> prefill_attention.PrefillTuning:
    """The same for prefill attention."""
    if device.type != "cuda":
        return prefill_attention.PrefillTuning(block_m=32, block_n=16)
    return prefill_attention.prefill_tuning(torch.cuda.get_device_properties(device).major)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(shape: Shape) -> str:
    extra = (f" window {shape.window}" if shape.window else "") + (" alibi" if shape.alibi else "")
    return f"{len(shape.context)} x <= {max(shape.context)}, heads {shape.heads}/{shape.kv_heads} x {shape.dim} {_short(shape.dtype)}{extra}"


def as_json(found: list[Check]) -> list[dict[str, Any]]:
    """The checks as plain data; an infinite error becomes None."""
    return [{**one._asdict(), "error": None if one.error == float("inf") else one.error, "passed": one.passed} for one in found]
