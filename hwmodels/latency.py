"""The latency-model protocol and its registry. A latency model prices a step from aggregates; it knows no scheduling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from serving.catalog import Gpu
from serving.errors import InputError, nearest
from serving.layout import Layout
from serving.llm import Llm
from serving.plan import StepShape

if TYPE_CHECKING:
    from hwmodels.group_links import GroupLinks

AllReduce = Callable[[float], float]  # bytes of the tensor to reduce -> seconds


class LatencyModel(Protocol):
    """Seconds of a step. ``shape`` is a StepShape or anything with its attributes (a BatchPlan)."""

    def step_s(self, shape: StepShape) -> float:
        """Seconds from the start of the step to its committed tokens: device and exposed host time."""

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of each of ``steps`` successive decode-only steps, the context growing by one token a sequence.

        Bit for bit what ``step_s`` returns for each of them. Where a step depends on those before it, fewer may be priced, one at least.
        """


def build(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    llm: Llm,
    gpu: Gpu,
    tensor_parallel: int = 1,
    weight_dtype: str | None = None,
    kv_dtype: str = "bf16",
    all_reduce_s: AllReduce | None = None,
    layout: Layout | None = None,
    links: GroupLinks | None = None,
    imbalance: float = 1.0,
    where: str = "latency",
) -> LatencyModel:
    """Return the latency model ``name`` for one replica: ``tensor_parallel`` GPUs of kind ``gpu`` serving ``llm``.

    ``layout`` replaces ``tensor_parallel`` where there is more to say; ``links`` are those between the replica's GPUs (default: the
    GPU's own), ``imbalance`` is the load of the busiest expert rank over the mean. ``weight_dtype`` None means the checkpoint's own.
    ``all_reduce_s`` prices an all-reduce by its bytes; without it the model uses its own. Raises InputError for an unknown name,
    option or dtype, naming ``where``, and for a layout that the model cannot price.
    """
    if name not in MODELS:
        raise InputError(f"{where}.name", f"there is no latency model named '{name}'", nearest(name, MODELS))
    layout = layout or Layout(tensor_parallel=tensor_parallel)
    layout.check(llm)
    factory = import_module(MODELS[name][0]).build
    common = {"llm": llm, "gpu": gpu, "weight_dtype": weight_dtype, "kv_dtype": kv_dtype, "where": where}
    if name == "roofline":
        from hwmodels.group_links import of_gpu

        return factory(dict(options or {}), layout=layout, links=links or of_gpu(gpu, layout, all_reduce_s), imbalance=imbalance, **common)
    if layout != Layout(tensor_parallel=layout.tensor_parallel):
        raise InputError(f"{where}.name", f"'{name}' prices tensor parallelism only", "use roofline for other layouts")
    if all_reduce_s is None and links is not None:
        all_reduce_s = links.all_reduce_s
    return factory(dict(options or {}), tensor_parallel=layout.tensor_parallel, all_reduce_s=all_reduce_s, **common)


def check_options(options: Mapping[str, Any], known: Mapping[str, object], where: str) -> None:
    """Raise InputError for an option that a latency model does not have."""
    for key in options:
        if key not in known:
            raise InputError(f"{where}.{key}", "unknown option", nearest(str(key), [*known, "name"]))


MODELS: dict[str, tuple[str, str]] = {  # name -> (module with a function build, what it is)
    "fitted": ("hwmodels.fitted", "coefficients that `twinserve calibrate` fitted to measured steps"),
    "recorded": ("hwmodels.recorded", "the steps of one measured run, replayed by their number"),
    "roofline": ("hwmodels.roofline", "datasheet rates, with efficiencies fitted per architecture; any LLM on any GPU"),
    "silicon": ("hwmodels.silicon", "operators measured by NVIDIA for one engine version; needs the extra [silicon]"),
    "table": ("hwmodels.table", "a folder of measured kernels, interpolated linearly"),
}
