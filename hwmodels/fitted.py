"""The ``fitted`` latency model: coefficients fitted to the steps of one device, by ``twinserve calibrate``.

    step = device . (1, T, T > 1, remainder tiles, any decode, decodes, decode context, prefill sequences, query-key pairs, prefill context, eager)
         + host   . (1, sequences, T, logits rows)

T is the number of token rows, padded to the captured size where a CUDA graph replays the step; remainder tiles are what a matrix product
adds to full tiles of four rows, one of two rows and one of one row; ``eager`` counts steps that no graph replays where there are graphs. No
coefficient is negative. A step of B decodes and nothing else may deviate from that line, because kernels change with B (a CPU takes longer for
two sequences than for three): ``decode_batches_s`` holds what it takes more or less by B, straight between the sizes that were measured and
constant beyond. Such a step is ``a + b * C`` with a and b looked up by B, a not below 0: ``step_s`` and ``run_s`` compute just that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hwmodels.latency import AllReduce, check_options
from serving.catalog import Gpu
from serving.errors import InputError, nearest
from serving.files import read_yaml
from serving.graph_buckets import GraphBuckets
from serving.llm import Llm
from serving.plan import StepShape

MEASURED = Path(__file__).resolve().parent / "measured"
DEVICE_TERMS = (
    "constant", "tokens", "several_tokens", "remainder_tiles", "any_decode", "decodes", "decode_context_tokens", "prefill_seqs",
    "query_key_pairs", "prefill_context_tokens", "eager",
)  # fmt: skip
HOST_TERMS = ("constant", "sequences", "tokens", "logits_rows")
FORMAT = 1


def remainder_tiles(rows: int) -> int:
    """Smaller tiles that a product of ``rows`` rows ends with, after the full ones of four: on a CPU three rows take longer than four."""
    return (rows & 1) + (rows >> 1 & 1)


def beyond_terms_s(batches_s: Mapping[int, float], decodes: Any) -> np.ndarray:
    """Seconds beyond the terms of decode-only steps of ``decodes`` sequences (a number or an array): interpolated, constant beyond the ends."""
    sizes = sorted(batches_s)
    return np.interp(decodes, sizes, [batches_s[size] for size in sizes])


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit of each term, none negative; ``graph_sizes`` are the captured batch sizes.

    ``decode_batches_s`` is what a decode-only step of so many sequences takes beyond its terms, seconds.
    """

    device: Mapping[str, float]
    host: Mapping[str, float]
    graph_sizes: tuple[int, ...] = ()
    decode_batches_s: Mapping[int, float] = field(default_factory=dict)


class Fitted:
    """Prices steps from coefficients. A step of several queries per decode is priced by its tokens alone: none was measured."""

    def __init__(self, coefficients: Coefficients, provenance: Mapping[str, Any] | None = None) -> None:
        self.graphs = GraphBuckets(coefficients.graph_sizes)
        self._device = coefficients.device
        self._host = coefficients.host
        self._batches_s = coefficients.decode_batches_s
        self._provenance = dict(provenance or {})
        self._per_token = coefficients.device["tokens"] + coefficients.host["tokens"]
        self._per_remainder = coefficients.device["remainder_tiles"]
        self._per_pair = coefficients.device["query_key_pairs"]
        self._per_prefill_context = coefficients.device["prefill_context_tokens"]
        self._per_context = coefficients.device["decode_context_tokens"]
        self._per_chunk = coefficients.device["prefill_seqs"] + coefficients.host["sequences"]
        self._per_row = coefficients.host["logits_rows"]
        self._decode: dict[tuple[int, int], float] = {}
        self._mixed: dict[tuple[int, int], float] = {}

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step. In a decode-only step every sequence samples, so ``logits_rows`` is not consulted."""
        decodes, queries = shape.decodes, shape.query_tokens_per_decode
        chunks = shape.chunks
        if not chunks:
            base = self._decode.get((decodes, queries))
            if base is None:
                base = self._decode_base(decodes, queries)
            return base + self._per_context * shape.decode_context_tokens
        base = self._mixed.get((decodes, queries))
        if base is None:
            base = self._mixed_base(decodes, queries)
        tokens = context = 0
        pairs = 0.0
        for new, before in chunks:
            tokens += new
            context += before
            pairs += new * (before + 0.5 * (new + 1))
        seconds = base + self._per_token * tokens + self._per_chunk * len(chunks) + self._per_row * shape.logits_rows
        if not decodes and tokens > 1:
            seconds += self._device["several_tokens"]
        if self._per_remainder:
            seconds += self._per_remainder * remainder_tiles(tokens + decodes * queries)
        return seconds + self._per_pair * pairs + self._per_prefill_context * context + self._per_context * shape.decode_context_tokens

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of ``steps`` successive decode steps; each does the float operations of ``step_s``."""
        decodes, queries = shape.decodes, shape.query_tokens_per_decode
        base = self._decode.get((decodes, queries))
        if base is None:
            base = self._decode_base(decodes, queries)
        slope, first = self._per_context, shape.decode_context_tokens
        if not decodes:
            return [base + slope * first] * steps
        return [base + slope * context for context in range(first, first + steps * decodes, decodes)]

    def path(self, shape: StepShape) -> tuple[int, str]:
        """Return (rows executed after padding, ``graph`` or ``eager``): graphs hold decodes only."""
        if shape.chunks:
            return shape.decodes * shape.query_tokens_per_decode + sum(new for new, _ in shape.chunks), "eager"
        return self.graphs.path(shape.decodes * shape.query_tokens_per_decode)

    def provenance(self) -> dict[str, Any]:
        """Where the coefficients come from."""
        return self._provenance

    def _decode_base(self, decodes: int, queries: int) -> float:
        """Seconds of a decode-only step but for its context."""
        rows, path = self.graphs.path(decodes * queries)
        device, host = self._device, self._host
        base = device["constant"] + host["constant"] + self._per_token * rows + host["sequences"] * decodes + host["logits_rows"] * decodes * queries
        base += device["decodes"] * decodes + (device["any_decode"] if decodes else 0.0) + (device["several_tokens"] if rows > 1 else 0.0)
        base += device["remainder_tiles"] * remainder_tiles(rows)
        base += device["eager"] if path == "eager" and self.graphs.largest else 0.0
        if self._batches_s and decodes and queries == 1:
            base = max(0.0, base + float(beyond_terms_s(self._batches_s, decodes)))
        self._decode[decodes, queries] = base
        return base

    def _mixed_base(self, decodes: int, queries: int) -> float:
        """Seconds of a step with chunks that depend on its decodes only, their context aside."""
        device, host = self._device, self._host
        base = device["constant"] + host["constant"] + self._per_token * decodes * queries + (device["decodes"] + host["sequences"]) * decodes
        base += device["any_decode"] + device["several_tokens"] if decodes else 0.0
        base += device["eager"] if self.graphs.largest else 0.0
        self._mixed[decodes, queries] = base
        return base


def load(name_or_path: str | Path, where: str = "latency.file") -> tuple[Coefficients, dict[str, Any]]:
    """Read a fit: a name in ``hwmodels/measured``, or a path. Returns it and the whole file. Raises InputError."""
    text = str(name_or_path)
    known = sorted(path.stem for path in MEASURED.glob("*.yaml"))
    path = MEASURED / f"{text}.yaml" if text in known else Path(text)
    if not path.is_file():
        raise InputError(where, f"there is no fit '{text}'", nearest(text, known) if known else "make one with `twinserve calibrate`")
    data = read_yaml(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(str(path), f"is no fit of format {FORMAT}", "make one with `twinserve calibrate`")
    sizes = data.get("graph_sizes") or []
    terms = (_terms(data, part, names, path) for part, names in (("device_s", DEVICE_TERMS), ("host_s", HOST_TERMS)))
    return Coefficients(*terms, tuple(sizes), _batches(data, path)), data


def _batches(data: Mapping[str, Any], path: Path) -> dict[int, float]:
    given = data.get("decode_batches_s") or {}
    if not isinstance(given, dict):
        raise InputError(f"{path}:decode_batches_s", "must hold seconds, by batch size")
    for size, value in given.items():
        if type(size) is not int or size < 1 or type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(f"{path}:decode_batches_s.{size}", "must be a number of seconds, of a batch size from 1", f"got {value!r}")
    return given


def _terms(data: Mapping[str, Any], part: str, names: tuple[str, ...], path: Path) -> dict[str, float]:
    given = data.get(part)
    if not isinstance(given, dict):
        raise InputError(f"{path}:{part}", "must hold the coefficients, by term")
    for key in given:
        if key not in names:
            raise InputError(f"{path}:{part}.{key}", "unknown term", nearest(str(key), names))
    values = {name: given.get(name, 0.0) for name in names}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InputError(f"{path}:{part}.{name}", "must be a number of seconds that is not negative", f"got {value!r}")
    return values


def build(options: Mapping[str, Any], *, llm: Llm, gpu: Gpu, tensor_parallel: int, weight_dtype: str | None, kv_dtype: str,
          all_reduce_s: AllReduce | None, where: str) -> Fitted:  # fmt: skip
    """Factory of ``latency: {name: fitted, file: NAME or PATH}``. Raises InputError when the fit is of another network or device.

    ``transfer: true`` uses it all the same: constants of one device do not carry over to another, so that is for comparisons only.
    """
    check_options(options, ("file", "transfer"), where)
    if "file" not in options:
        raise InputError(f"{where}.file", "names the fit to use", "a name in hwmodels/measured, or a file that `twinserve calibrate` wrote")
    coefficients, data = load(options["file"], f"{where}.file")
    asked = {"llm": llm.name, "gpu": gpu.name, "tensor_parallel": tensor_parallel}
    for key, value in asked.items():
        if not options.get("transfer") and data.get(key) != value:
            raise InputError(f"{where}.file", f"'{options['file']}' was fitted with {key} {data.get(key)}, not {value}", "set transfer: true to use it all the same")
    return Fitted(coefficients, data)
