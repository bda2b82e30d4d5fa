"""Operator timings of one GPU, independent of any LLM: GEMMs, attention and all-reduce, times in milliseconds (bf16).

    gemm*.csv           m, n, k, latency                                            one product [m,k] x [k,n]
    prefill_attn*.csv   batch_size, isl, num_heads, num_key_value_heads, latency    one layer, causal, no cached prefix
    decode_attn*.csv    batch_size, step, num_heads, ..., latency                   one layer, KV length = step + 1
    custom_allreduce*.csv  num_gpus, message_size (ELEMENTS), backend (..._graph, ..._eager), latency

An LLM's step is composed from them layer by layer. Element-wise kernels were not measured: they move known bytes at the
rate the catalogue gives for the GPU. No operator is ever priced below what the datasheet allows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.profiles.columns import Columns, read_columns
from hwmodels.profiles.grid import Extrapolations, Line, Surface, locate
from serving.errors import InputError

MS = 1e-3
BF16_BYTES = 2
MEASURED_HEAD_DIM = 128


class OperatorKernels:
    """Times of the kernels of a step of one LLM at one tensor-parallel degree, from operator tables. Seconds, all layers together."""

    asynchronous = False

    def __init__(self, folder: Path, *, llm: Any, gpu: Any, tensor_parallel: int, beyond: Extrapolations, dtype: str | None = None) -> None:
        _refuse_unmeasured(folder, llm, dtype)
        llm.check_tensor_parallel(tensor_parallel, "cluster.tensor_parallel")
        self.beyond = beyond
        self._folder, self._llm, self._gpu, self._tp = folder, llm, gpu, tensor_parallel
        self._gemm = Gemms(_one(folder, "gemm*.csv"), gpu, beyond)
        heads = (llm.heads // tensor_parallel, llm.kv_heads_per_gpu(tensor_parallel))
        self._prefill = _prefill_lines(_one(folder, "prefill_attn*.csv"), heads, beyond)
        self._decode = _decode_surfaces(_one(folder, "decode_attn*.csv"), heads, beyond)
        self._all_reduce = _all_reduce_lines(folder, tensor_parallel, beyond) if tensor_parallel > 1 else None
        self.launches = llm.layers * (4 + 1 + len(self._elementwise_values()) + 2 * (tensor_parallel > 1)) + 4
        self._matrices = [*llm.attention_matrices(tensor_parallel), *llm.mlp_matrices(llm.intermediate, tensor_parallel)]

    def fixed_s(self, tokens: int, rows: int, graphed: bool) -> float:
        """Products, element-wise kernels, all-reduces and the LM head; ``graphed`` selects the all-reduce that a graph replays."""
        llm = self._llm
        per_layer = sum(self._gemm.seconds(tokens, matrix.outputs, matrix.inputs) for matrix in self._matrices)
        per_layer += self._elementwise_s(tokens)
        once = self._move_s(4 * tokens * llm.hidden * BF16_BYTES)  # embedding look-up and final norm
        if rows:
            once += self._gemm.seconds(rows, -(-llm.vocab // self._tp), llm.hidden)
            once += self._move_s(2 * rows * llm.vocab * 4)  # the sampler reads and normalises fp32 logits
        if self._all_reduce is not None:
            reduce_s = self._all_reduce[graphed].at(tokens * llm.hidden) * MS
            per_layer += 2 * reduce_s
            once += reduce_s  # the embedding is split by vocabulary
        return llm.layers * per_layer + once

    def decode_attention(self, decodes: int) -> tuple[list[float], list[float]]:
        """Return knots of the mean KV length and the attention time at each, linear between them."""
        scale = self._llm.layers * MS
        rows = [[scale * weight * ms for ms in surface.row_at(decodes)] for weight, surface in self._decode]
        return self._decode[0][1].axes[1], [sum(column) for column in zip(*rows)]

    def mixed_attention_s(self, chunk: int, before: int, decodes: int, mean_kv: float) -> float:
        """Prefill plus decode attention: mixed batches were not measured, so the two kernels follow each other."""
        seconds = self._prefill_s(chunk, before)
        if decodes:
            seconds += self._llm.layers * MS * sum(weight * surface.at(decodes, mean_kv) for weight, surface in self._decode)
        return seconds

    def extra_chunk_s(self, chunk: int, before: int) -> float:
        """Attention that a further chunk adds to the batch: its own time less one launch."""
        return max(0.0, self._prefill_s(chunk, before) - self._prefill_s(1, 0))

    def provenance(self) -> dict[str, Any]:
        """Which tables, and what stands in for what was not measured."""
        return {
            "layout": "operators",
            "folder": str(self._folder),
            "gpu": self._gpu.name,
            "llm": self._llm.name,
            "tensor_parallel": self._tp,
            "elementwise": f"bytes at the catalogue's rate for {self._gpu.name}",
            "mixed_attention": "prefill and decode kernels one after the other",
        }

    def _prefill_s(self, chunk: int, before: int) -> float:
        """Attention of ``chunk`` new tokens after ``before``: the share of the causal triangle of the whole length that is new.

        A triangle of side L holds L^2/2 query-key pairs, and the first ``before`` rows of it are not computed again.
        """
        length = chunk + before
        alone = self._causal_ms(chunk)
        if before:
            alone = max(alone, self._causal_ms(length) * (1.0 - (before / length) ** 2))
        return self._llm.layers * alone * MS

    def _causal_ms(self, length: int) -> float:
        return sum(weight * self._one_causal_ms(line, length) for weight, line in self._prefill)

    def _one_causal_ms(self, line: Line, length: int) -> float:
        longest = line.xs[-1]
        if length <= longest:
            return line.at(length)
        self.beyond.note(line.name, line.axis_name, length, longest)
        return line.ys[-1] * (length / longest) ** 2

    def _elementwise_s(self, tokens: int) -> float:
        return sum(self._move_s(tokens * values * BF16_BYTES) for values in self._elementwise_values())

    def _elementwise_values(self) -> list[int]:
        """Values that each element-wise kernel of a layer reads and writes per token: norms with residual, rotary embedding, KV
        write and activation (and per-head norms of Q and K)."""
        llm = self._llm
        kv_dim = llm.kv_heads_per_gpu(self._tp) * llm.head_dim
        q_dim = llm.heads // self._tp * llm.head_dim
        kernels = [4 * llm.hidden] * llm.norms_per_layer
        kernels += [2 * (q_dim + kv_dim), 4 * kv_dim, 3 * llm.intermediate // self._tp]
        if llm.qk_norm:
            kernels.append(2 * (q_dim + kv_dim))
        return kernels

    def _move_s(self, size_bytes: float) -> float:
        fit = self._gpu.kernels.elementwise
        return fit.latency_s + size_bytes / (self._gpu.memory_bytes_per_s * fit.memory_efficiency)


class Gemms:
    """Times of products [m,k] x [k,n]: a line over m for each measured (n, k), bilinear between them.

    Beyond the largest n or k the time grows in proportion, as a product that already fills the GPU does. Below the
    smallest it follows the slope, but never falls faster than in proportion. The datasheet bounds it from below.
    """

    def __init__(self, path: Path, gpu: Any, beyond: Extrapolations) -> None:
        table = read_columns(path, axes=("m", "n", "k"), times=("latency",))
        numbers = table.numbers
        self.name = str(path)
        self._gpu, self._beyond = gpu, beyond
        self.ns, self.ks = (np.unique(numbers[axis]).tolist() for axis in ("n", "k"))
        self._lines = {}
        for n in self.ns:
            for k in self.ks:
                rows = np.flatnonzero((numbers["n"] == n) & (numbers["k"] == k))
                if not rows.size:
                    raise InputError(str(path), f"columns 'n' and 'k': no row has n = {n:g} and k = {k:g}", "the (n, k) grid must be full")
                self._lines[n, k] = _line(table, rows, "m", "latency", f"{path} (n = {n:g}, k = {k:g})", beyond)

    def seconds(self, m: int, n: int, k: int) -> float:
        """Return the seconds of one product."""
        time_ms = _edge(lambda n_at: _edge(lambda k_at: self._lines[n_at, k_at].at(m), self.ks, k), self.ns, n)
        flops_s = 2.0 * m * n * k / self._gpu.peak_flops("bf16")
        bytes_s = BF16_BYTES * (m * k + n * k + m * n) / self._gpu.memory_bytes_per_s
        return max(time_ms * MS, flops_s, bytes_s)


def _edge(time_at: Any, axis: list[float], x: float) -> float:
    """Interpolate ``time_at`` over ``axis``; proportional beyond its end, at least proportional below its start."""
    first, last = axis[0], axis[-1]
    if x > last:
        return time_at(last) * x / last
    if x >= first:
        i, weight = locate(axis, x)
        low = time_at(axis[i])
        return low if weight == 0.0 else low + weight * (time_at(axis[i + 1]) - low)
    edge = time_at(first)
    if len(axis) == 1:
        return edge
    slope = max(0.0, (time_at(axis[1]) - edge) / (axis[1] - first))
    return max(edge - slope * (first - x), edge * x / first)


def _refuse_unmeasured(folder: Path, llm: Any, dtype: str | None) -> None:
    hint = "the roofline latency model can price it"
    if llm.dtype_of_weights(dtype) not in ("bf16", "fp16"):
        raise InputError(str(folder), f"holds bf16 timings and the weights are {llm.dtype_of_weights(dtype)}", hint)
    if llm.moe or llm.mla or llm.sliding_window:
        raise InputError(str(folder), f"holds no timings for the experts, latent or windowed attention of '{llm.name}'", hint)
    if llm.head_dim != MEASURED_HEAD_DIM:
        raise InputError(str(folder), f"measured attention with head_dim 128 and '{llm.name}' has {llm.head_dim}", hint)


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) == 1:
        return found[0]
    raise InputError(str(folder), f"{len(found)} files match '{pattern}' where one is needed")


def _line(table: Columns, rows: np.ndarray, axis: str, time: str, name: str, beyond: Extrapolations) -> Line:
    xs = table.numbers[axis][rows]
    order = np.argsort(xs, kind="stable")
    repeated = np.flatnonzero(np.diff(xs[order]) == 0)
    if repeated.size:
        row = int(rows[order[repeated[0] + 1]])
        raise table.refuse(row, axis, f"{table.numbers[axis][row]:g} was measured twice", "one time per grid point")
    return Line(name, axis, xs[order].tolist(), table.numbers[time][rows][order].tolist(), beyond)


def _blend(table: Columns, heads: tuple[int, int], beyond: Extrapolations) -> list[tuple[float, str, np.ndarray]]:
    """Return (weight, label, rows) of the measured counts of heads and KV heads around ``heads``; below, the smallest holds."""
    names = ("num_heads", "num_key_value_heads")
    columns = [table.numbers[name] for name in names]
    sides = [_sides(table, name, wanted, beyond) for name, wanted in zip(names, heads)]
    blended = []
    for outer, q_heads in sides[0]:
        for inner, kv_heads in sides[1]:
            label = f"{table.path} ({q_heads:g} heads, {kv_heads:g} KV heads)"
            rows = np.flatnonzero((columns[0] == q_heads) & (columns[1] == kv_heads))
            if not rows.size:
                raise InputError(label, "was not measured", "the grid of head counts must be full")
            blended.append((outer * inner, label, rows))
    return blended


def _sides(table: Columns, name: str, wanted: int, beyond: Extrapolations) -> list[tuple[float, float]]:
    axis = np.unique(table.numbers[name]).tolist()
    i, weight = locate(axis, wanted)
    if weight > 1.0:
        beyond.note(str(table.path), name, wanted, axis[-1])
    pair = [(1.0 - weight, axis[i])] + ([(weight, axis[i + 1])] if weight else [])
    return [side for side in pair if side[0]]


def _prefill_lines(path: Path, heads: tuple[int, int], beyond: Extrapolations) -> list[tuple[float, Line]]:
    table = read_columns(path, axes=("batch_size", "isl", "num_heads", "num_key_value_heads"), times=("latency",))
    lines = []
    for weight, label, rows in _blend(table, heads, beyond):
        single = rows[table.numbers["batch_size"][rows] == 1]
        if not single.size:
            raise InputError(label, "column 'batch_size': no row has batch 1")
        lines.append((weight, _line(table, single, "isl", "latency", label, beyond)))
    return lines


def _decode_surfaces(path: Path, heads: tuple[int, int], beyond: Extrapolations) -> list[tuple[float, Surface]]:
    table = read_columns(path, axes=("batch_size", "step", "num_heads", "num_key_value_heads"), times=("latency",))
    knots = np.unique(table.numbers["step"]) + 1
    surfaces = []
    for weight, label, rows in _blend(table, heads, beyond):
        points = np.stack([table.numbers["batch_size"][rows], table.numbers["step"][rows] + 1], axis=1)
        surface = Surface(label, ("batch_size", "KV length"), points, table.numbers["latency"][rows], beyond)
        surfaces.append((weight, surface))
        if surface.axes[1] != knots.tolist():
            surface.resample_columns(knots)
    return surfaces


def _all_reduce_lines(folder: Path, tensor_parallel: int, beyond: Extrapolations) -> dict[bool, Line]:
    """Lines over message size for the graph-replayed (True) and the eager (False) all-reduce of ``tensor_parallel`` GPUs."""
    path = _one(folder, "*allreduce*.csv")
    table = read_columns(path, axes=("num_gpus", "message_size"), times=("latency",), words=("backend",))
    graphs = np.array([backend.endswith("graph") for backend in table.words["backend"]])
    measured = np.unique(table.numbers["num_gpus"]).astype(int).tolist()
    lines = {}
    for graphed in (True, False):
        rows = np.flatnonzero((table.numbers["num_gpus"] == tensor_parallel) & (graphs == graphed))
        if not rows.size:
            known = ", ".join(map(str, measured))
            raise InputError(str(path), f"tensor_parallel {tensor_parallel} was not measured", f"these tables can answer for: 1, {known}")
        lines[graphed] = _line(table, rows, "message_size", "latency", f"{path} ({tensor_parallel} GPUs)", beyond)
    return lines
