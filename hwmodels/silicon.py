"""The ``silicon`` latency model: per-step times of aiconfigurator-core (measured kernels of many GPUs), tabulated once.

The package (PyPI ``aiconfigurator-core`` 0.12.x, Apache-2.0, extra ``[silicon]``) prices the operators of a prefill or a
decode step of an LLM on a GPU under a version of vLLM, SGLang or TensorRT-LLM, from its own tables and offline. It is asked
on a grid when the model is built and never again: inside the event loop only the tables answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata, resources
from typing import Any

import numpy as np

from hwmodels.latency import check_options
from hwmodels.profiles.grid import Extrapolations, Line, Surface
from hwmodels.table import TableLatency, graphs_of, host_of
from serving.errors import InputError, nearest

PACKAGE, SERIES, EXTRA = "aiconfigurator-core", "0.12.", "pip install 'twinserve[silicon]'"
MS = 1e-3

# Products jump where the kernel's tile changes, so the token axis is dense: an answer costs the package about 7 us.
TOKENS = (*range(1, 513), *range(528, 4097, 16), *range(4224, 16385, 128), *range(17408, 32769, 1024))
DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024)
KV_LENGTHS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144,
              7168, 8192, 10240, 12288, 14336, 16384, 20480, 24576, 28672, 32768, 40960, 49152, 65536, 81920, 98304, 131072)  # fmt: skip
CHUNKS = (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
BEFORE = (0, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768, 65536)

_GEMM_QUANT = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "int8": "int8_wo", "int4": "int4_wo", "nvfp4": "nvfp4"}
_KV_QUANT = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "int8": "int8"}
_OPTIONS = ("engine", "version", "system", "model", "gemm_quant", "kv_quant", "attention_quant", "expert_parallel", "capture_sizes", "capture_largest",
            "host_step_s", "host_sequence_s", "launch_s")  # fmt: skip


class SiliconKernels:
    """Kernel times of one LLM, GPU, degree, quantisation and engine version, as tables. Seconds, all layers together."""

    asynchronous = False

    def __init__(self, engine: Any, origin: Mapping[str, Any], llm: Any, beyond: Extrapolations) -> None:
        longest = llm.max_model_len
        self.beyond = beyond
        self._origin = dict(origin)
        kv_lengths = [length for length in KV_LENGTHS if length <= longest] or [1, longest]
        decode = {(b, kv): _split(engine.decode_step_per_op(b, kv, 1)) for b in DECODES for kv in kv_lengths}
        prefill = {(q, c): _context(engine, q, c) for q in CHUNKS for c in BEFORE if q + c <= max(longest, CHUNKS[1])}
        if not any(parts["attention"] for parts in [*decode.values(), *prefill.values()]):
            raise ValueError("it does not price attention as an operator of its own for this LLM")
        graphed = {t: _split(engine.decode_step_per_op(t, kv_lengths[0], 1)) for t in TOKENS}
        eager = {t: _context(engine, t, 0) for t in TOKENS}
        self.launches = llm.layers * len(engine.decode_step_per_op(1, 1, 1))
        label = f"{PACKAGE} {origin['system']}"
        self._fixed = {True: _line(label, "tokens", graphed, "fixed", beyond), False: _line(label, "tokens", eager, "fixed", beyond)}
        self._logits = _line(label, "logits rows", graphed, "logits", beyond)
        self._decode = _surface(label, ("decodes", "KV length"), decode, beyond)
        self._prefill = _surface(label, ("chunk", "context before it"), prefill, beyond)

    def fixed_s(self, tokens: int, rows: int, graphed: bool) -> float:
        """Everything but attention: the decode operators for a step that a CUDA graph replays, the prefill ones otherwise."""
        logits = self._logits.at(rows) if rows else 0.0
        return (self._fixed[graphed].at(tokens) + logits) * MS

    def decode_attention(self, decodes: int) -> tuple[list[float], list[float]]:
        """Return knots of the mean KV length and the attention time at each, linear between them."""
        return self._decode.axes[1], [ms * MS for ms in self._decode.row_at(decodes)]

    def mixed_attention_s(self, chunk: int, before: int, decodes: int, mean_kv: float) -> float:
        """Prefill plus decode attention, as the package composes mixed steps."""
        ms = self._prefill.at(chunk, before)
        return (ms + self._decode.at(decodes, mean_kv) if decodes else ms) * MS

    def extra_chunk_s(self, chunk: int, before: int) -> float:
        """Attention that a further chunk adds to the batch: its own time less one launch."""
        return max(0.0, self._prefill.at(chunk, before) - self._prefill.rows[0][0]) * MS

    def provenance(self) -> dict[str, Any]:
        """Package, system, engine version, model and quantisation."""
        return self._origin


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
    """Build the model from a scenario's ``latency`` options. Raises InputError for what the package cannot answer or is not there.

    ``engine`` (vllm, sglang, trtllm) and ``version`` (a version the package measured, or ``current``); ``system``, ``model``,
    ``gemm_quant`` and ``kv_quant`` override what is derived from the catalogue entries, ``attention_quant`` (of a prompt's attention)
    what the package takes for the model; ``expert_parallel`` splits experts; host times and captured sizes as in the roofline.
    """
    check_options(options, dict.fromkeys(_OPTIONS), where)
    _check_types(options, where)
    version = installed_version(where)
    system = options.get("system") or _system_of(gpu.name, where)
    model = options.get("model") or _model_of(llm, where)
    engine_name = options.get("engine", "vllm")
    experts = options.get("expert_parallel", 1)
    request = {
        "backend_version": options.get("version", "current"),
        "tp_size": tensor_parallel,
        "gemm_quant_mode": options.get("gemm_quant") or _quant(_GEMM_QUANT, llm.dtype_of_weights(weight_dtype), f"{where}.gemm_quant"),
        "kvcache_quant_mode": options.get("kv_quant") or _quant(_KV_QUANT, kv_dtype, f"{where}.kv_quant"),
    }
    if "attention_quant" in options:
        request["fmha_quant_mode"] = options["attention_quant"]
    if llm.moe:
        if tensor_parallel % experts:
            raise InputError(f"{where}.expert_parallel", f"{experts} does not divide tensor_parallel {tensor_parallel}")
        request |= {"moe_tp_size": tensor_parallel // experts, "moe_ep_size": experts}
    origin = {"package": f"{PACKAGE} {version}", "system": system, "engine": engine_name, "model": model, **request}
    graphs, host = graphs_of(options, where), host_of(options, gpu, where, exposed=True)
    with _quiet(), _refusals(where, origin):
        from aiconfigurator_core.sdk import EngineHandle, perf_database

        request["backend_version"] = perf_database.resolve_query_version(system, engine_name, options.get("version", "current"))
        origin |= request
        kernels = SiliconKernels(EngineHandle.compile(model, system, engine_name, **request), origin, llm, Extrapolations())
    return TableLatency(kernels, graphs=graphs, host=host)


def _check_types(options: Mapping[str, Any], where: str) -> None:
    for key in ("engine", "version", "system", "model", "gemm_quant", "kv_quant", "attention_quant"):
        if not isinstance(options.get(key, ""), str):
            raise InputError(f"{where}.{key}", "must be text", f"got {options[key]!r}")
    experts = options.get("expert_parallel", 1)
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 1:
        raise InputError(f"{where}.expert_parallel", "must be a whole number above 0", f"got {experts!r}")


def installed_version(where: str = "latency") -> str:
    """Return the version of aiconfigurator-core. Raises InputError naming the extra when it is absent or of another series."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise InputError(f"{where}.name", f"'silicon' needs the package {PACKAGE} {SERIES}x, which is not installed", f"{EXTRA}") from None
    if not version.startswith(SERIES):
        raise InputError(f"{where}.name", f"'silicon' needs {PACKAGE} {SERIES}x and finds {version}", f"{EXTRA}")
    return version


def _split(operators: Sequence[tuple]) -> dict[str, float]:
    """Sum an operator list (name, ms, ...) into attention, logits and the rest."""
    parts = {"attention": 0.0, "logits": 0.0, "fixed": 0.0}
    for name, ms, *_ in operators:
        part = "attention" if "attention" in name else "logits" if "logits" in name else "fixed"
        parts[part] += ms
    return parts


def _context(engine: Any, chunk: int, before: int) -> dict[str, float]:
    context, _ = engine.run_static_per_op(batch_size=1, isl=chunk + before, osl=1, prefix=before, mode="static_ctx")
    return _split(context)


def _line(label: str, axis: str, points: Mapping[int, Mapping[str, float]], part: str, beyond: Extrapolations) -> Line:
    return Line(f"{label} ({part})", axis, list(points), [parts[part] for parts in points.values()], beyond)


def _surface(label: str, axes: tuple[str, str], points: Mapping[tuple[int, int], Mapping[str, float]], beyond: Extrapolations) -> Surface:
    times = np.array([parts["attention"] for parts in points.values()])
    return Surface(f"{label} (attention)", axes, np.array(list(points), dtype=float), times, beyond)


def _system_of(gpu_name: str, where: str) -> str:
    """Return the package's name of a catalogue GPU: the longest of its systems that the GPU's name begins with."""
    systems = _names("systems", ".yaml")
    wanted = gpu_name.replace("-", "_")
    found = [system for system in systems if wanted == system or wanted.startswith(f"{system}_")]
    if not found:
        raise InputError(f"{where}.system", f"{PACKAGE} has no system for the GPU '{gpu_name}'", nearest(wanted, systems))
    return max(found, key=len)


def _model_of(llm: Any, where: str) -> str:
    """Return the package's name of a catalogue LLM, by its base name."""
    models = [name.replace("--", "/") for name in _names("model_configs", "_config.json") if "hf_quant" not in name]
    wanted = llm.name.lower()
    found = [name for name in models if name.split("/")[1].lower() in (wanted, f"meta-{wanted}", f"{wanted}-v0.1", f"{wanted}-instruct")]
    if not found:
        raise InputError(f"{where}.model", f"{PACKAGE} has no model for '{llm.name}'", nearest(llm.name, models))
    return min(found, key=lambda name: (len(name), name))


def _names(folder: str, ending: str) -> list[str]:
    """Base names of the package's data files with an ending, sorted."""
    root = resources.files("aiconfigurator_core") / folder
    return sorted(entry.name.removesuffix(ending) for entry in root.iterdir() if entry.name.endswith(ending))


def _quant(table: Mapping[str, str], dtype: str, where: str) -> str:
    if dtype not in table:
        raise InputError(where, f"{PACKAGE} has no quantisation for {dtype}", nearest(dtype, table))
    return table[dtype]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the package's notes about tables of other model families off stderr while it loads."""
    logger = logging.getLogger("aiconfigurator_core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _refusals(where: str, origin: Mapping[str, Any]) -> Iterator[None]:
    """Turn whatever the package raises into one line; it has no error type that covers all of it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        asked = f"{origin['model']} on {origin['system']} with {origin['engine']}, TP {origin['tp_size']}, {origin['gemm_quant_mode']}"
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise InputError(where, f"{PACKAGE} cannot price {asked}: {reason}") from error
