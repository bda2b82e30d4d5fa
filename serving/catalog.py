"""Facts about language models and GPUs, read from YAML, validated, frozen. No figure of any device lives in code.

An entry is named (``llama-3.1-8b``) or given as a path to a file of the same form. Sizes are bytes, rates per second.
"""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from serving.errors import InputError, nearest
from serving.files import read_yaml
from serving.llm import Llm

CATALOG = Path(__file__).resolve().parent.parent / "hwmodels" / "catalog"
FACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, config=FACT)
class KernelFit:
    """One kernel family: seconds = latency + work / (datasheet rate x efficiency).

    Efficiencies lie in (0, 1], the latency is not negative: a kernel never beats the datasheet.
    """

    latency_s: float
    memory_efficiency: PositiveFloat
    compute_efficiency: PositiveFloat = 1.0
    half_saturation_units: float = 0.0  # decode attention: (sequences x KV heads) at which bandwidth efficiency halves
    median_error: float | None = None  # of the fit, as a fraction

    @model_validator(mode="after")
    def _no_faster_than_the_datasheet(self) -> KernelFit:
        if self.latency_s < 0 or self.half_saturation_units < 0:
            raise ValueError("latency_s and half_saturation_units must not be negative")
        if max(self.memory_efficiency, self.compute_efficiency) > 1:
            raise ValueError("an efficiency above 1 would beat the datasheet")
        return self


@dataclass(frozen=True, slots=True, config=FACT)
class LinkFit:
    """An all-reduce among one group size: seconds = latency + 2 (n-1)/n bytes / (link bytes per second x efficiency)."""

    latency_s: float
    efficiency: PositiveFloat


@dataclass(frozen=True, slots=True, config=FACT)
class KernelTimes:
    """How close the kernels of one architecture come to its datasheet, each figure fitted to measured operators."""

    name: str
    source: str
    gemm: dict[str, KernelFit]  # by weight dtype; bf16 is required and stands in for the rest
    prefill_attention: KernelFit
    decode_attention: KernelFit
    elementwise: KernelFit
    experts: dict[str, KernelFit] = field(default_factory=dict)  # all routed experts of a layer, by weight dtype; gemm stands in
    link: str = ""  # the kind of link that all_reduce was measured on; on another one the datasheet link counts
    all_reduce: dict[int, LinkFit] = field(default_factory=dict)  # by tensor-parallel degree
    notes: str = ""

    @model_validator(mode="after")
    def _bf16_is_there(self) -> KernelTimes:
        if "bf16" not in self.gemm:
            raise ValueError("gemm needs a bf16 entry")
        return self


@dataclass(frozen=True, slots=True, config=FACT)
class Host:
    """What a serving engine adds: host seconds per step, launches where no CUDA graph does them, memory beside torch's."""

    name: str
    source: str
    step_s: float
    sequence_s: float
    launch_s: float
    graph_launch_s: float
    context_bytes: int  # CUDA context and libraries
    communicator_bytes: dict[int, int] = field(default_factory=dict)  # by tensor-parallel degree
    notes: str = ""

    def non_torch_bytes(self, tensor_parallel: int) -> int:
        """Bytes of GPU memory that the allocator does not see; beyond the measured degrees the nearest lower one holds."""
        degrees = [degree for degree in self.communicator_bytes if degree <= tensor_parallel]
        return self.context_bytes + (self.communicator_bytes[max(degrees)] if degrees else 0)


@dataclass(frozen=True, slots=True, config=FACT)
class Link:
    """A link of one GPU: datasheet bytes per second *one way*, the measured share of it, and a per-operation latency."""

    kind: str
    bytes_per_s: PositiveFloat
    efficiency: PositiveFloat = 1.0
    latency_s: float = 0.0
    gpus: PositiveInt = 1  # how many GPUs the link joins


@dataclass(frozen=True, slots=True, config=FACT)
class Gpu:
    """Datasheet facts of one GPU. ``flops`` are dense (no sparsity), per second, by dtype (int8: operations)."""

    name: str
    description: str
    vendor: Literal["nvidia", "amd", "intel"]
    architecture: str
    memory_bytes: PositiveInt  # as sold
    memory_bytes_per_s: PositiveFloat
    flops: dict[str, PositiveFloat]
    pcie: Link
    tdp_w: PositiveFloat
    kernels: KernelTimes
    host: Host
    sources: dict[str, str]
    confidence: Literal["high", "medium", "low"]
    usable_memory_bytes: PositiveInt | None = None  # what the runtime reports as total; null: unknown
    scale_up: Link | None = None  # NVLink, Infinity Fabric; null: PCIe only
    sm_count: PositiveInt | None = None
    price_usd_per_h: PositiveFloat | None = None  # a typical rental; null: none found
    price_low_usd_per_h: PositiveFloat | None = None
    price_hyperscaler_usd_per_h: PositiveFloat | None = None
    notes: str = ""

    @model_validator(mode="after")
    def _facts_have_sources(self) -> Gpu:
        if "bf16" not in self.flops:
            raise ValueError("flops needs a bf16 entry")
        for fact in ("memory_bytes", "memory_bytes_per_s", "flops"):
            if fact not in self.sources:
                raise ValueError(f"sources lacks an entry for {fact}")
        return self

    @property
    def total_memory_bytes(self) -> int:
        """Bytes the runtime reports as total, or the bytes as sold where nobody has reported them."""
        return self.usable_memory_bytes or self.memory_bytes

    def peak_flops(self, dtype: str) -> float:
        """Dense operations per second for matrix products with weights of ``dtype``.

        A dtype without tensor-core support here is stored narrow and multiplied at bf16 (weight-only quantisation).
        """
        return self.flops.get(dtype, self.flops["bf16"])

    @property
    def link(self) -> Link:
        """The link that joins the GPUs of one replica: the scale-up fabric, or PCIe where there is none."""
        return self.scale_up or self.pcie


_KINDS: dict[str, tuple[type, str]] = {
    "llms": (Llm, "language model"),
    "gpus": (Gpu, "GPU"),
    "kernels": (KernelTimes, "kernel set"),
    "hosts": (Host, "host"),
}


def names(kind: str) -> list[str]:
    """Names of the catalogue entries of ``kind`` (gpus, llms, topologies, kernels, hosts), sorted."""
    return sorted(path.stem for path in (CATALOG / kind).glob("*.yaml"))


def load_llm(name_or_path: str | Path, where: str = "llm") -> Llm:
    """Return a language model by catalogue name or file. Raises InputError naming ``where``."""
    return _load("llms", str(name_or_path), where)


def load_gpu(name_or_path: str | Path, where: str = "cluster.gpu") -> Gpu:
    """Return a GPU by catalogue name or file. Raises InputError naming ``where``."""
    return _load("gpus", str(name_or_path), where)


def read_entry(kind: str, name_or_path: str | Path, where: str) -> tuple[dict[str, Any], str]:
    """Return the raw mapping of an entry and the path that names it in messages. Raises InputError."""
    text = str(name_or_path)
    known = CATALOG / kind / f"{text}.yaml"
    is_path = text.endswith((".yaml", ".yml")) or "/" in text
    path = Path(text) if is_path else known
    if not is_path and text not in names(kind):
        label = _KINDS[kind][1] if kind in _KINDS else kind.removesuffix("ies") + "y"
        raise InputError(where, f"there is no {label} named '{text}' in the catalogue", nearest(text, names(kind)))
    if not path.exists() or path.is_dir():
        problem = "it is a directory" if path.is_dir() else "no such file"
        raise InputError(where, f"cannot read '{path}': {problem}", "give a catalogue name or an existing file")
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise InputError(str(path), "must hold a mapping of facts")
    return data, str(path) if is_path else f"{kind}/{text}.yaml"


def _load(kind: str, name_or_path: str, where: str) -> Any:
    if name_or_path in names(kind):
        return _load_named(kind, name_or_path)
    return _build(kind, *read_entry(kind, name_or_path, where))


@lru_cache(maxsize=256)
def _load_named(kind: str, name: str) -> Any:
    return _build(kind, *read_entry(kind, name, kind))


def _build(kind: str, data: dict[str, Any], origin: str) -> Any:
    if kind == "gpus":
        data = dict(data)
        for part, part_kind in (("kernels", "kernels"), ("host", "hosts")):
            if isinstance(data.get(part), str):
                data[part] = _load(part_kind, data[part], f"{origin}:{part}")
    try:
        return TypeAdapter(_KINDS[kind][0]).validate_python(data)
    except ValidationError as error:
        raise _first_mistake(error, origin, _KINDS[kind][0]) from None


def _first_mistake(error: ValidationError, origin: str, target: type) -> InputError:
    """Turn a validation error into one line: dotted path, what is wrong, the nearest valid key."""
    mistakes = error.errors()
    unknown = [m for m in mistakes if m["type"] in ("unexpected_keyword_argument", "extra_forbidden")]
    first = unknown[0] if unknown else mistakes[0]
    path = ".".join(str(step) for step in first["loc"])
    where = f"{origin}:{path}" if path else origin
    if unknown:
        keys = _keys_beside(target, first["loc"])
        return InputError(where, "unknown key", nearest(str(first["loc"][-1]), keys))
    problem = first["msg"].removeprefix("Value error, ")
    return InputError(where, problem[:1].lower() + problem[1:], _got(first))


def _keys_beside(target: type, loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys allowed in the mapping that holds the last step of ``loc``."""
    import typing

    current: Any = target
    for step in loc[:-1]:
        fields = getattr(current, "__pydantic_fields__", {})
        if step not in fields:
            continue  # a key of a dict: its value type was entered already
        current = _inner_type(fields[step].annotation, typing)
    return sorted(getattr(current, "__pydantic_fields__", {}))


def _inner_type(annotation: Any, typing: Any) -> Any:
    """Unwrap ``X | None`` and ``dict[K, X]`` to the fact type X."""
    candidates = [annotation, *typing.get_args(annotation)]
    return next((c for c in candidates if hasattr(c, "__pydantic_fields__")), annotation)


def _got(mistake: Any) -> str:
    value = mistake.get("input")
    return f"got {value!r}" if isinstance(value, (str, int, float, bool)) or value is None else ""
