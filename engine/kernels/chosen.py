"""Products of rows that each choose their matrix, or none: LoRA adapters by slot, experts by the router's choice.

A program takes a tile of rows and of outputs. It goes through the matrices that its rows chose, each time with the rows of the others set to
zero; a tile whose rows chose nothing returns without reading anything, and a matrix that nobody chose is never read. Rows of one prompt share
an adapter, and rows sorted by expert share theirs: one pass over the weights on the tensor cores. The grid depends on shapes alone and nothing
is read on the host, so a graph can hold it. Meaning: ``engine.kernels.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.interpreting import INTERPRETING
from engine.kernels.pointwise import silu_mul

BLOCK_T, BLOCK_O, BLOCK_I = 16, 64, 64


@triton.jit
def chosen_kernel(
    x, w, out, chosen, rows, x_stride, out_stride, matrix_stride, width, second, third, end,
    ADD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Outputs [0, second), [second, third), [third, end) are parts; part p reads the p-th width values of its row of x.
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    choice = tl.load(chosen + row, mask=row < rows, other=-1)
    current = tl.max(choice, 0)
    if current < 0:
        return
    block = tl.program_id(1)
    blocks_0 = (second + BLOCK_O - 1) // BLOCK_O
    blocks_1 = (third - second + BLOCK_O - 1) // BLOCK_O
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    last = tl.where(part == 0, second, tl.where(part == 1, third, end))
    begun = tl.where(part == 0, 0, tl.where(part == 1, blocks_0, blocks_0 + blocks_1))
    column = first + (block - begun) * BLOCK_O + tl.arange(0, BLOCK_O)
    step = tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    while current >= 0:
        mine = choice == current
        weights = w + current.to(tl.int64) * matrix_stride
        for start in range(0, width, BLOCK_I):
            inside = start + step < width
            values = tl.load(
                x + row.to(tl.int64)[:, None] * x_stride + (part * width + start + step)[None, :], mask=mine[:, None] & inside[None, :], other=0.0
            )
            factor = tl.load(weights + column[None, :] * width + (start + step)[:, None], mask=(column < last)[None, :] & inside[:, None], other=0.0)
            if UPCAST:
                values = values.to(tl.float32)
                factor = factor.to(tl.float32)
            total += tl.dot(values, factor, input_precision="ieee")
        current = tl.max(tl.where(choice < current, choice, -1), 0)
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    writable = (choice >= 0)[:, None] & (column < last)[None, :]
    if ADD:
        total += tl.load(at, mask=writable, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=writable)


def _multiply(x: Tensor, w: Tensor, out: Tensor, chosen: Tensor, widths: tuple[int, ...], *, add: bool = False) -> None:
    """Write to ``out`` (or add) the products of the rows with the matrix [outputs, width] of ``w`` that each chose; others stay as they are."""
    rows, width = chosen.shape[0], w.shape[2]
    ends = [sum(widths[: part + 1]) for part in range(3)]
    block_i = max(16, min(BLOCK_I, triton.next_power_of_2(width)))
    block_o = max(16, min(BLOCK_O, triton.next_power_of_2(max(widths))))
    blocks = sum(triton.cdiv(one, block_o) for one in widths)
    chosen_kernel[(triton.cdiv(rows, BLOCK_T), blocks)](
        x, w, out, chosen, rows, x.stride(0), out.stride(0), w.stride(0), width, *ends,
        ADD=add, BLOCK_T=BLOCK_T, BLOCK_O=block_o, BLOCK_I=block_i, UPCAST=INTERPRETING, num_warps=4, num_stages=3,
    )  # fmt: skip


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: tuple[int, ...], adapters: Tensor) -> None:
    """Add to ``y`` [T, outputs], in place, B·A·x of each row's slot in ``adapters`` int32 [T] (-1: none); ``widths``: outputs of at most three parts."""
    low = torch.empty(x.shape[0], a.shape[1], dtype=x.dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    _multiply(x, a, low, adapters, (a.shape[1],))
    _multiply(low, b, y, adapters, widths, add=True)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, share: Tensor, *, fixed: bool) -> Tensor:
    """Sum over each row's ``chosen`` experts [T, k] (-1: dropped) of their SwiGLU of ``x`` times ``share`` [T, k].

    Rows go sorted by expert, the dropped ones first: whole tiles of those return at once. ``fixed``: shapes never depend on the choice here.
    """
    per_token = chosen.shape[1]
    choice, order = chosen.reshape(-1).to(torch.int32).sort(stable=True)
    token = order // per_token
    wide = torch.empty(len(order), gate_up.shape[1], dtype=x.dtype, device=x.device)
    _multiply(x[token], gate_up, wide, choice, (gate_up.shape[1],))
    part = torch.zeros(len(order), x.shape[1], dtype=x.dtype, device=x.device)  # rows that nobody writes count nothing
    _multiply(silu_mul(wide), down, part, choice, (x.shape[1],))
    by_token = torch.empty_like(part).index_copy_(0, order, part)
    return (by_token.view(*chosen.shape, -1) * share[:, :, None]).sum(1)
