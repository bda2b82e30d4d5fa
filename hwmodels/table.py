"""The ``table`` latency model: measured kernels, interpolated linearly, composed into the time of a step.

    step = fixed(T', rows) + attention + host

T' is the number of token rows, padded to the captured size when a CUDA graph replays the step. Attention of a step with
chunks is that of the largest chunk together with the decodes, plus what each further chunk adds. Attention of decodes alone
is linear, piece by piece, in their mean KV length, so a decode-only step of B sequences is ``a + b * C`` with a and b looked
up by B and by the piece that the sum of contexts C falls into; both ``step_s`` and ``run_s`` compute just that.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hwmodels.profiles.grid import Extrapolations
from hwmodels.profiles.skew import Skew
from serving.errors import InputError, nearest

LONG_RUN_STEPS = 64  # below this a list comprehension beats numpy's call overhead


class StepKernels(Protocol):
    """Kernel times of one LLM on one GPU at one tensor-parallel degree, for all layers, in seconds."""

    beyond: Extrapolations

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
    """Time of a decode-only step of B sequences: ``a[i] + b[i] * C`` where piece i holds the context sum C."""

    __slots__ = ("a", "b", "starts")

    def __init__(self, decodes: int, fixed_s: float, knots: Sequence[float], times_s: Sequence[float]) -> None:
        slopes = [(t1 - t0) / (k1 - k0) for k0, k1, t0, t1 in zip(knots, knots[1:], times_s, times_s[1:])]
        slopes[-1] = max(slopes[-1], 0.0)  # this one goes on beyond the grid
        self.starts = [0.0, *[knot * decodes for knot in knots[:-1]]]
        self.a = [fixed_s + times_s[0], *[fixed_s + t - slope * k for k, t, slope in zip(knots, times_s, slopes)]]
        self.b = [0.0, *[slope / decodes for slope in slopes]]  # below the first knot the launch floor holds

    def at(self, context_tokens: float) -> float:
        """Return seconds for decodes that attend to ``context_tokens`` KV entries together."""
        i = bisect_right(self.starts, context_tokens) - 1
        return self.a[i] + self.b[i] * context_tokens

    def over(self, context_tokens: int, grows: int, steps: int) -> list[float]:
        """Return the seconds of ``steps`` successive steps whose context sum grows by ``grows``; the same float operations as ``at``."""
        if steps < LONG_RUN_STEPS:
            return [self.at(context_tokens + grows * i) for i in range(steps)]
        contexts = context_tokens + grows * np.arange(steps, dtype=np.float64)
        piece = np.searchsorted(self.starts, contexts, side="right") - 1
        return (np.asarray(self.a)[piece] + np.asarray(self.b)[piece] * contexts).tolist()


class TableLatency:
    """Prices steps from measured kernels. ``needs_contexts`` says that plans must offer ``decode_contexts()``."""

    def __init__(
        self, kernels: StepKernels, *, captured: Sequence[int] = (), host_s: float = 0.0, skew: Skew | None = None
    ) -> None:
        self._kernels = kernels
        self._captured = sorted(captured)
        self._host_s = host_s
        self._skew = skew
        self.needs_contexts = skew is not None
        self._decode: dict[int, DecodeTable] = {}
        self._fixed: dict[tuple[int, int], float] = {}

    def step_s(self, shape: Any) -> float:
        """Return the seconds of one step of ``shape`` (StepShape or BatchPlan); 0 for an empty one."""
        if shape.chunks or shape.query_tokens_per_decode != 1:
            return self._mixed_s(shape)
        decodes = shape.decodes
        if not decodes:
            return 0.0
        table = self._decode.get(decodes) or self._decode_table(decodes)
        if self._skew is not None:
            return self._skewed(table, decodes, shape.decode_context_tokens, *self._longest(shape))
        return table.at(shape.decode_context_tokens)

    def run_s(self, shape: Any, steps: int) -> list[float]:
        """Return the durations of ``steps`` successive decode-only steps, bit for bit those of ``step_s`` one by one."""
        decodes, context = shape.decodes, shape.decode_context_tokens
        if shape.chunks:
            raise ValueError("a run holds decode-only steps")
        if shape.query_tokens_per_decode != 1:
            grown = shape.query_tokens_per_decode * decodes
            return [self._wide_decodes_s(shape, context + i * grown) for i in range(steps)]
        if not decodes:
            return [0.0] * steps
        table = self._decode.get(decodes) or self._decode_table(decodes)
        if self._skew is None:
            return table.over(context, decodes, steps)
        # Every sequence grows by one, so the share above (longest + mean)/2 stays what it is.
        longest, above = self._longest(shape)
        return [self._skewed(table, decodes, context + i * decodes, longest + i, above) for i in range(steps)]

    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from, for the run directory; ``extrapolated`` names what fell outside the grids."""
        return {
            **self._kernels.provenance(),
            "host_s": self._host_s,
            "captured_up_to": self._captured[-1] if self._captured else 0,
            "skew": self._skew is not None,
            "extrapolated": self._kernels.beyond.sentences(),
        }

    def _fixed_s(self, tokens: int, rows: int) -> float:
        key = (tokens, rows)
        known = self._fixed.get(key)
        if known is None:
            at = bisect_left(self._captured, tokens)
            graphed = at < len(self._captured)
            padded = self._captured[at] if graphed else tokens
            known = self._fixed[key] = self._kernels.fixed_s(padded, rows, graphed) + self._host_s
        return known

    def _decode_table(self, decodes: int) -> DecodeTable:
        knots, times_s = self._kernels.decode_attention(decodes)
        table = self._decode[decodes] = DecodeTable(decodes, self._fixed_s(decodes, decodes), knots, times_s)
        return table

    def _mixed_s(self, shape: Any) -> float:
        chunks, decodes = shape.chunks, shape.decodes
        if not chunks:
            return self._wide_decodes_s(shape, shape.decode_context_tokens)
        tokens = sum(new for new, _ in chunks) + decodes * shape.query_tokens_per_decode
        seconds = self._fixed_s(tokens, shape.logits_rows)
        largest = max(chunks) if len(chunks) > 1 else chunks[0]
        if len(chunks) > 1:
            rest = list(chunks)
            rest.remove(largest)
            for new, before in rest:
                seconds += self._kernels.extra_chunk_s(new, before)
        return seconds + self._mixed_attention_s(shape, *largest)

    def _mixed_attention_s(self, shape: Any, new: int, before: int) -> float:
        decodes = shape.decodes
        mean_kv = shape.decode_context_tokens / decodes if decodes else 0.0
        seconds = self._kernels.mixed_attention_s(new, before, decodes, mean_kv)
        if self._skew is None or decodes < 2:
            return seconds
        longest, above = self._longest(shape)
        waiting = self._kernels.mixed_attention_s(new, before, decodes, float(longest))
        return seconds + self._skew.alpha(True, decodes, above) * (waiting - seconds)

    def _wide_decodes_s(self, shape: Any, context: int) -> float:
        """Decodes that verify several tokens each: token rows multiply, KV is read once (attention is bound by memory)."""
        decodes = shape.decodes
        rows = decodes * shape.query_tokens_per_decode
        table = self._decode.get(decodes) or self._decode_table(decodes)
        return table.at(context) - self._fixed_s(decodes, decodes) + self._fixed_s(rows, rows)

    def _longest(self, shape: Any) -> tuple[int, int]:
        """Return the longest context and how many lie above the middle between it and the mean."""
        contexts = shape.decode_contexts()
        longest = max(contexts)
        middle = len(contexts) * longest + shape.decode_context_tokens
        twice = 2 * len(contexts)
        return longest, sum(1 for context in contexts if twice * context > middle)

    def _skewed(self, table: DecodeTable, decodes: int, context: int, longest: int, above: int) -> float:
        seconds = table.at(context)
        if decodes < 2 or self._skew is None:
            return seconds
        return seconds + self._skew.alpha(False, decodes, above) * (table.at(decodes * longest) - seconds)


def vllm_capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes that vLLM captures by default up to ``largest``: 1, 2, 4, then every 8 to 256, then every 16."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]


_OPTIONS = {"profile": str, "host_s": (int, float), "skew": bool, "captured_up_to": int, "capture_sizes": list}


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
    ``host_s``: seconds of host time added to each step (0). ``skew``: price unequal decode lengths from skew.csv (false).
    ``capture_sizes`` or ``captured_up_to`` (512): CUDA-graph sizes; 0 or an empty list means no graphs.
    """
    check_options(options, _OPTIONS, where)
    if "profile" not in options:
        raise InputError(f"{where}.profile", "is missing: the table model needs a folder of measured kernels")
    folder = Path(os.path.expandvars(options["profile"])).expanduser()
    captured = capture_sizes(options, where)
    from hwmodels.profiles import read_profile, read_skew

    if kv_dtype not in ("bf16", "fp16"):
        raise InputError(f"{where}.profile", f"profiles time attention on a 16-bit KV cache, not {kv_dtype}", "use the roofline latency model")
    kernels = read_profile(folder, llm=llm, gpu=gpu, tensor_parallel=tensor_parallel, dtype=weight_dtype, where=f"{where}.profile")
    skew = read_skew(folder, llm=llm, gpu=gpu, tensor_parallel=tensor_parallel, where=f"{where}.skew") if options.get("skew") else None
    return TableLatency(kernels, captured=captured, host_s=float(options.get("host_s", 0.0)), skew=skew)


def check_options(options: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Raise InputError for an unknown option or one of the wrong type."""
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{where}.{key}", "unknown option", nearest(key, known))
        boolean_number = isinstance(value, bool) and known[key] is not bool
        if value is None or not isinstance(value, known[key]) or boolean_number:
            raise InputError(f"{where}.{key}", f"{value!r} has the wrong type")
    if not 0.0 <= float(options.get("host_s", 0.0)) < 10.0:
        raise InputError(f"{where}.host_s", f"{options['host_s']} is no host time of a step in seconds")


def capture_sizes(options: Mapping[str, Any], where: str) -> list[int]:
    """Return the captured batch sizes that the options name. Raises InputError for sizes that are no positive integers."""
    sizes = options.get("capture_sizes")
    if sizes is None:
        return vllm_capture_sizes(options.get("captured_up_to", 512))
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise InputError(f"{where}.capture_sizes", f"{sizes} are not all positive integers")
    return sorted(sizes)
