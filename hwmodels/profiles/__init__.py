"""Folders of measured kernels: which layout one has, and the reader for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwmodels.profiles.grid import Extrapolations
from serving.errors import InputError

if TYPE_CHECKING:
    from hwmodels.profiles.skew import Skew
    from hwmodels.table import StepKernels


def layout_of(folder: Path, where: str) -> str:
    """Return ``layerwise`` or ``operators``. Raises InputError saying what the folder lacks."""
    if not folder.is_dir():
        raise InputError(where, f"'{folder}' is no folder", "give the folder of a profile")
    if (folder / "dense.csv").exists() or any(folder.glob("tp*/*.csv")):
        return "layerwise"
    if any(folder.glob("gemm*.csv")):
        return "operators"
    raise InputError(where, f"'{folder}' holds no profile", "expected tp<N>/dense.csv, attention.csv, ... or gemm*.csv, decode_attn*.csv, ...")


def read_profile(folder: Path, *, llm: Any, gpu: Any, tensor_parallel: int, dtype: str | None, where: str) -> StepKernels:
    """Read a profile for one LLM at one tensor-parallel degree. Raises InputError for what it cannot answer."""
    if layout_of(folder, where) == "layerwise":
        from hwmodels.profiles.layerwise import LayerwiseKernels

        return LayerwiseKernels(folder, llm=llm, tensor_parallel=tensor_parallel, beyond=Extrapolations(), dtype=dtype)
    from hwmodels.profiles.operators import OperatorKernels

    return OperatorKernels(folder, llm=llm, gpu=gpu, tensor_parallel=tensor_parallel, beyond=Extrapolations(), dtype=dtype)


def read_skew(folder: Path, *, llm: Any, gpu: Any, tensor_parallel: int, where: str) -> Skew:
    """Read the skew table beside a layer-wise profile. Raises InputError when there is none or the GPU's SMs are not known."""
    from hwmodels.profiles.layerwise import tensor_parallel_folder
    from hwmodels.profiles.skew import Skew

    if layout_of(folder, where) != "layerwise":
        raise InputError(where, f"'{folder}' has the operator layout, which measures decodes of equal length only", "set skew: false")
    if gpu is None or gpu.sm_count is None:
        raise InputError(where, "the GPU's sm_count is needed: skew changes where the attention kernel stops splitting sequences")
    inside = tensor_parallel_folder(folder, tensor_parallel)
    for name in ("skew.csv", "skew.csv.gz"):
        if (inside / name).exists():
            kv_heads = max(1, llm.kv_heads // tensor_parallel)
            return Skew(inside / name, split_limit=0.8 * 2 * gpu.sm_count / kv_heads)
    raise InputError(where, f"'{inside}' has no skew.csv", "set skew: false")


def skew_profiled(folder: Path) -> bool:
    """Whether the profile's meta.yaml says that skew was measured with the rest of it: a skew.csv from elsewhere is not used unasked."""
    from hwmodels.profiles.layerwise import read_meta

    top = folder.parent if folder.name.startswith("tp") and not (folder / "meta.yaml").exists() else folder
    return bool((read_meta(top).get("skew_profile") or {}).get("enabled"))
