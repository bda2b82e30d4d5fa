"""The ``table`` latency model: measured kernels, interpolated linearly, composed into the time of a step.

    step = max(fixed(T', rows) + attention, launches) + host

T' is the number of token rows, padded to the captured size when a CUDA graph replays the step; without a graph the host's
launches, one kernel after the other, bound the step from below. Attention of a step with
chunks is that of the largest chunk together with the decodes, plus what each further chunk adds. Attention of decodes alone
is linear, piece by piece, in their mean KV length, so a decode-only step of B sequences is ``a + b * C`` with a and b looked
up by B and by the piece that the sum of contexts C falls into; both ``step_s`` and ``run_s`` compute just that.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hwmodels.latency import check_options
from hwmodels.profiles import read_profile, read_skew, skew_profiled
from hwmodels.profiles.grid import Extrapolations
from hwmodels.profiles.skew import Skew
from serving.errors import InputError
from serving.graph_buckets import GraphBuckets, default_sizes

LONG_RUN_STEPS = 64  # below this a list comprehension beats numpy's call overhead


class StepKernels(Protocol):
    """Kernel times of one LLM on one GPU at one tensor-parallel degree, for all layers, in seconds."""

    beyond: Extrapolations
    launches: int  # kernels of a step
    asynchronous: bool  # profiled in an engine whose host time hides behind the device

    def fixed_s(self, tokens: int, rows: int, graphed: bool) -> float:
        """Everything but attention, for ``tokens`` token rows of which ``rows`` get logits."""

    def decode_attention(self, decodes: int) -> tuple[list[float], list[float]]:
        """Knots of the mean KV length (rising) and the attention time at each; linear between, sloping on beyond the last."""

    def mixed_attention_s(self, chunk: int, before: int, decodes: int, mean_kv: float) -> float:
        """Attention of one prefill chunk after ``before`` cached tokens, in one batch with ``decodes`` (may be 0) decodes."""

    def extra_chunk_s(self, chunk: int, before: int) -> float:
        """Attention that a further, smaller chunk adds."""

    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from."""


class DecodeTable:
    """Time of a decode-only step of B sequences: ``max(a[i] + b[i] * C, floor) + host`` where piece i holds the context sum C."""

    __slots__ = ("a", "b", "floor_s", "host_s", "starts")

    def __init__(self, decodes: int, fixed_s: float, knots: Sequence[float], times_s: Sequence[float], floor_s: float, host_s: float) -> None:
        slopes = [(t1 - t0) / (k1 - k0) for k0, k1, t0, t1 in zip(knots, knots[1:], times_s, times_s[1:])]
        slopes[-1] = max(slopes[-1], 0.0)  # this one goes on beyond the grid
        self.starts = [0.0, *[knot * decodes for knot in knots[:-1]]]
        self.a = [fixed_s + times_s[0], *[fixed_s + t - slope * k for k, t, slope in zip(knots, times_s, slopes)]]
        self.b = [0.0, *[slope / decodes for slope in slopes]]  # below the first knot the launch floor holds
        self.floor_s, self.host_s = floor_s, host_s

    def at(self, context_tokens: float) -> float:
        """Return seconds for decodes that attend to ``context_tokens`` KV entries together."""
        i = bisect_right(self.starts, context_tokens) - 1
        seconds = self.a[i] + self.b[i] * context_tokens
        return (seconds if seconds > self.floor_s else self.floor_s) + self.host_s

    def over(self, context_tokens: int, grows: int, steps: int) -> list[float]:
        """Return the seconds of ``steps`` successive steps whose context sum grows by ``grows``; the same float operations as ``at``."""
        if steps < LONG_RUN_STEPS:
            return [self.at(context_tokens + grows * i) for i in range(steps)]
        contexts = context_tokens + grows * np.arange(steps, dtype=np.float64)
        piece = np.searchsorted(self.starts, contexts, side="right") - 1
        seconds = np.asarray(self.a)[piece] + np.asarray(self.b)[piece] * contexts
        return (np.maximum(seconds, self.floor_s) + self.host_s).tolist()


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that the host adds to a step, and to it per sequence, and that it needs to launch a kernel without a graph.

    ``step_s`` may be negative: then it corrects a profile whose kernels ran slower than those of the engine.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    launch_s: float = 0.0


class TableLatency:
    """Prices steps from measured kernels. ``needs_contexts`` says that plans must offer ``decode_contexts()``."""

    def __init__(self, kernels: StepKernels, *, graphs: GraphBuckets, host: Host, skew: Skew | None = None) -> None:
        self.graphs = graphs
        self.needs_contexts = skew is not None
        self._kernels, self._host, self._skew = kernels, host, skew
        self._decode: dict[int | tuple[int, int], DecodeTable] = {}
        self._fixed: dict[tuple[int, int], tuple[float, float]] = {}

    def step_s(self, shape: Any) -> float:
        """Return the seconds of one step of ``shape`` (StepShape or BatchPlan). In a decode-only step every row is sampled."""
        if shape.chunks:
            return self._mixed_s(shape)
        decodes, queries = shape.decodes, shape.query_tokens_per_decode
        if not decodes:
            return self._host.step_s
        table = self._decode.get(decodes if queries == 1 else (decodes, queries)) or self._decode_table(decodes, queries)
        if self._skew is None or decodes == 1:
            return table.at(shape.decode_context_tokens)
        return self._skewed(table, decodes, shape.decode_context_tokens, *_longest(shape))

    def run_s(self, shape: Any, steps: int) -> list[float]:
        """Return the durations of ``steps`` successive decode-only steps, bit for bit those of ``step_s`` one by one."""
        decodes, context, queries = shape.decodes, shape.decode_context_tokens, shape.query_tokens_per_decode
        if not decodes:
            return [self._host.step_s] * steps
        table = self._decode.get(decodes if queries == 1 else (decodes, queries)) or self._decode_table(decodes, queries)
        if self._skew is None or decodes == 1:
            return table.over(context, decodes, steps)
        # Every sequence grows by one, so the number above (longest + mean)/2 stays what it is.
        longest, above = _longest(shape)
        return [self._skewed(table, decodes, context + i * decodes, longest + i, above) for i in range(steps)]

    def path(self, shape: Any) -> tuple[int, str]:
        """Return (tokens executed after padding, ``graph`` or ``eager``)."""
        return self.graphs.path(shape.decodes * shape.query_tokens_per_decode + sum(new for new, _ in shape.chunks))

    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from, for the run directory; ``extrapolated`` names what fell outside the grids."""
        return {
            **self._kernels.provenance(),
            "host_step_s": self._host.step_s,
            "host_sequence_s": self._host.sequence_s,
            "captured_up_to": self.graphs.largest,
            "skew": self._skew is not None,
            "extrapolated": self._kernels.beyond.sentences(),
        }

    def _fixed_s(self, tokens: int, rows: int) -> tuple[float, float]:
        """Return (everything but attention, the least a step without a graph takes), both without host time."""
        key = (tokens, rows)
        known = self._fixed.get(key)
        if known is None:
            executed, path = self.graphs.path(tokens)
            floor = 0.0 if path == "graph" else self._kernels.launches * self._host.launch_s
            known = self._fixed[key] = self._kernels.fixed_s(executed, rows, path == "graph"), floor
        return known

    def _decode_table(self, decodes: int, queries: int) -> DecodeTable:
        """Build the table of a batch size. Decodes that verify several tokens each multiply token rows; their KV is read once,
        since attention is bound by memory."""
        rows = decodes * queries
        fixed_s, floor_s = self._fixed_s(rows, rows)
        knots, times_s = self._kernels.decode_attention(decodes)
        table = DecodeTable(decodes, fixed_s, knots, times_s, floor_s, self._host.step_s + self._host.sequence_s * decodes)
        self._decode[decodes if queries == 1 else (decodes, queries)] = table
        return table

    def _mixed_s(self, shape: Any) -> float:
        chunks, decodes = shape.chunks, shape.decodes
        if len(chunks) == 1:
            new, before = chunks[0]
            tokens = new + decodes * shape.query_tokens_per_decode
            seconds = 0.0
        else:
            new, before = largest = max(chunks)
            tokens = sum(chunk[0] for chunk in chunks) + decodes * shape.query_tokens_per_decode
            rest = list(chunks)
            rest.remove(largest)
            seconds = sum(self._kernels.extra_chunk_s(*chunk) for chunk in rest)
        fixed_s, floor_s = self._fixed_s(tokens, shape.logits_rows)
        seconds += fixed_s + self._mixed_attention_s(shape, new, before)
        host = self._host
        return max(seconds, floor_s) + host.step_s + host.sequence_s * (decodes + len(chunks))

    def _mixed_attention_s(self, shape: Any, new: int, before: int) -> float:
        decodes = shape.decodes
        mean_kv = shape.decode_context_tokens / decodes if decodes else 0.0
        seconds = self._kernels.mixed_attention_s(new, before, decodes, mean_kv)
        if self._skew is None or decodes < 2:
            return seconds
        longest, above = _longest(shape)
        waiting = self._kernels.mixed_attention_s(new, before, decodes, float(longest))
        return seconds + self._skew.alpha(new, before, decodes, above) * (waiting - seconds)

    def _skewed(self, table: DecodeTable, decodes: int, context: int, longest: int, above: int) -> float:
        seconds = table.at(context)
        alpha = self._skew.alpha(0, 0, decodes, above) if self._skew else 0.0
        return seconds + alpha * (table.at(decodes * longest) - seconds)


def _longest(shape: Any) -> tuple[int, int]:
    """Return the longest decode context and how many lie above the middle between it and the mean."""
    contexts = shape.decode_contexts()
    longest = max(contexts)
    twice = 2 * len(contexts)
    middle = len(contexts) * longest + shape.decode_context_tokens
    return longest, sum(1 for context in contexts if twice * context > middle)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``latency: {name: table, ...}``. None: see ``build``."""

    profile: str = ""
    skew: bool | None = None
    capture_sizes: tuple[int, ...] | None = None
    capture_largest: int = 512
    host_step_s: float | None = None
    host_sequence_s: float | None = None
    launch_s: float | None = None
    step_offset_s: float = 0.0


def build(
    options: Mapping[str, Any],
    *,
    llm: Any,
    gpu: Any,
    tensor_parallel: int = 1,
    weight_dtype: str | None = None,
    kv_dtype: str = "bf16",
    where: str = "latency",
    **_: Any,
) -> TableLatency:
    """Build the model from a scenario's ``latency`` options. Raises InputError for anything that cannot be answered.

    ``profile`` (required): a folder in the layer-wise or the operator layout; environment variables expand.
    ``skew``: price unequal decode lengths from the profile's skew.csv; by default if its meta.yaml says that skew was
    profiled with the rest. ``step_offset_s``: a fitted correction of every step, of either sign. ``capture_sizes`` or ``capture_largest``:
    CUDA-graph sizes, an empty list or 0 for none. ``host_step_s``, ``host_sequence_s``, ``launch_s``: as in the roofline;
    by default those of the GPU's host entry, but no exposed host time with a layer-wise profile, which comes from an engine
    that schedules asynchronously.
    """
    check_options(options, Options.__dataclass_fields__, where)
    chosen = Options(**options)
    if not isinstance(chosen.profile, str) or not chosen.profile:
        raise InputError(f"{where}.profile", "is missing: the table model needs a folder of measured kernels")
    if not isinstance(chosen.skew, bool | None):
        raise InputError(f"{where}.skew", "must be true or false", f"got {chosen.skew!r}")
    if kv_dtype not in ("bf16", "fp16"):
        raise InputError(f"{where}.profile", f"profiles time attention on a 16-bit KV cache, not {kv_dtype}", "use the roofline latency model")
    folder = Path(os.path.expandvars(chosen.profile)).expanduser()
    kernels = read_profile(folder, llm=llm, gpu=gpu, tensor_parallel=tensor_parallel, dtype=weight_dtype, where=f"{where}.profile")
    wanted = skew_profiled(folder) if chosen.skew is None else chosen.skew
    skew = read_skew(folder, llm=llm, gpu=gpu, tensor_parallel=tensor_parallel, where=f"{where}.skew") if wanted else None
    host = host_of(options, gpu, where, exposed=not kernels.asynchronous)
    offset_s = chosen.step_offset_s
    if isinstance(offset_s, bool) or not isinstance(offset_s, (int, float)) or not math.isfinite(offset_s):
        raise InputError(f"{where}.step_offset_s", "must be a number of seconds", f"got {offset_s!r}")
    host = replace(host, step_s=host.step_s + offset_s)
    return TableLatency(kernels, graphs=graphs_of(options, where), host=host, skew=skew)


def host_of(options: Mapping[str, Any], gpu: Any, where: str, *, exposed: bool) -> Host:
    """Return the host times: what the options say, else the GPU's host entry (nothing a step when not ``exposed``)."""
    known = gpu.host
    values = {"step_s": known.step_s if exposed else 0.0, "sequence_s": known.sequence_s if exposed else 0.0, "launch_s": known.launch_s}
    for name, key in (("step_s", "host_step_s"), ("sequence_s", "host_sequence_s"), ("launch_s", "launch_s")):
        given = options.get(key)
        if given is None:
            continue
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < math.inf:
            raise InputError(f"{where}.{key}", "must be a number of seconds that is not negative", f"got {given!r}")
        values[name] = float(given)
    return Host(**values)


def graphs_of(options: Mapping[str, Any], where: str) -> GraphBuckets:
    """Return the captured sizes that the options name. Raises InputError for anything but whole numbers."""
    largest = options.get("capture_largest", 512)
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 0:
        raise InputError(f"{where}.capture_largest", "must be a whole number that is not negative", f"got {largest!r}")
    sizes = options.get("capture_sizes")
    if sizes is None:
        return GraphBuckets(default_sizes(largest), f"{where}.capture_largest")
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise InputError(f"{where}.capture_sizes", "must be a list of whole numbers", f"got {sizes!r}")
    return GraphBuckets(sizes, f"{where}.capture_sizes")
