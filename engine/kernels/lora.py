"""What LoRA adapters add, for rows of different adapters at once: one kernel, run twice a matrix (shrink to the rank, expand to the outputs).

A program takes a tile of rows and of outputs. It goes through the adapters that occur in its rows, each time with the rows of the others set to
zero: rows of one prompt share an adapter and cost one pass over its weights on the tensor cores, a tile of decodes one pass per adapter in it.
The grid depends on shapes alone and nothing is read on the host, so a graph can hold it. Meaning: ``engine.kernels.reference.add_adapters``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.interpreting import INTERPRETING

BLOCK_T, BLOCK_O, BLOCK_I = 16, 64, 64


@triton.jit
def adapter_kernel(
    x, w, out, adapters, rows, x_stride, out_stride, slot_stride, width, second, third, end,
    ADD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # Outputs [0, second), [second, third), [third, end) are parts; part p reads the p-th width values of its row of x.
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    block = tl.program_id(1)
    blocks_0 = (second + BLOCK_O - 1) // BLOCK_O
    blocks_1 = (third - second + BLOCK_O - 1) // BLOCK_O
    part = (block >= blocks_0).to(tl.int32) + (block >= blocks_0 + blocks_1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    last = tl.where(part == 0, second, tl.where(part == 1, third, end))
    begun = tl.where(part == 0, 0, tl.where(part == 1, blocks_0, blocks_0 + blocks_1))
    column = first + (block - begun) * BLOCK_O + tl.arange(0, BLOCK_O)
    slot = tl.load(adapters + row, mask=row < rows, other=-1)
    step = tl.arange(0, BLOCK_I)
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    current = tl.max(slot, 0)
    while current >= 0:
        mine = slot == current
        weights = w + current.to(tl.int64) * slot_stride
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
        current = tl.max(tl.where(slot < current, slot, -1), 0)
    at = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    writable = (slot >= 0)[:, None] & (column < last)[None, :]
    if ADD:
        total += tl.load(at, mask=writable, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=writable)


def _blocks(widths: tuple[int, ...], block: int) -> int:
    return sum(triton.cdiv(width, block) for width in widths)


def _run(x: Tensor, w: Tensor, out: Tensor, adapters: Tensor, widths: tuple[int, ...], *, add: bool) -> None:
    rows, inputs = adapters.shape[0], w.shape[2]
    ends = [sum(widths[: part + 1]) for part in range(3)]
    block_i = max(16, min(BLOCK_I, triton.next_power_of_2(inputs)))
    block_o = max(16, min(BLOCK_O, triton.next_power_of_2(max(widths))))
    adapter_kernel[(triton.cdiv(rows, BLOCK_T), _blocks(widths, block_o))](
        x, w, out, adapters, rows, x.stride(0), out.stride(0), w.stride(0), inputs, *ends,
        ADD=add, BLOCK_T=BLOCK_T, BLOCK_O=block_o, BLOCK_I=block_i, UPCAST=INTERPRETING, num_warps=4, num_stages=3,
    )  # fmt: skip


def add_adapters(y: Tensor, x: Tensor, a: Tensor, b: Tensor, widths: tuple[int, ...], adapters: Tensor) -> None:
    """Add to ``y`` [T, outputs], in place, B·A·x of each row's slot in ``adapters`` int32 [T] (-1: none); ``widths``: outputs of at most three parts."""
    low = torch.empty(x.shape[0], a.shape[1], dtype=x.dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    _run(x, a, low, adapters, (a.shape[1],), add=False)
    _run(low, b, y, adapters, widths, add=True)
