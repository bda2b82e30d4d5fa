"""Fit the kernel sets of the catalogue to measured operators.

    pip install 'twinserve[silicon]' && python -m hwmodels.derive h100_sxm h100-sxm > hwmodels/catalog/kernels/h100-sxm.yaml

reads the operator timings that the Apache-2.0 wheel ``aiconfigurator-core`` ships for one system and fits, per kernel
family, seconds = latency + work / (datasheet rate x efficiency), with efficiencies held at or below one. The loss is the
logarithm of predicted / measured, softened against outliers, so that microseconds and milliseconds count alike.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving.catalog import read_entry
from serving.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pandas as pd

Fit = dict[str, float]
ELEMENTWISE = {"latency_s": 3.0e-06, "memory_efficiency": 0.8}  # mem_empirical_constant_latency, mem_bw_empirical_scaling_factor


def silicon_folder() -> Path:
    """Return the data folder of the installed wheel. Raises InputError when it is not installed."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise InputError("hwmodels.derive", "the wheel aiconfigurator-core is not installed", "pip install 'twinserve[silicon]'")
    return Path(spec.origin).parent / "systems" / "data"


def derive(folder: Path, gpu: dict[str, Any], system: str, name: str) -> dict[str, Any]:
    """Return the kernel set of ``system``, fitted against the datasheet rates in ``gpu``."""
    bandwidth = float(gpu["memory_bytes_per_s"])
    flops = {dtype: float(rate) for dtype, rate in gpu["flops"].items()}
    gemm, gemm_version = _newest(folder / system / "gemm" / "vllm", "gemm_perf")
    prefill, version = _newest(folder / system / "attention" / "vllm", "context_attention_perf")
    decode, _ = _newest(folder / system / "attention" / "vllm", "generation_attention_perf")
    link = gpu.get("scale_up") or gpu["pcie"]
    return {
        "name": name,
        "source": (
            f"aiconfigurator-core 0.12.0 (Apache-2.0), systems/data/{system}, vLLM {gemm_version} GEMM and {version} attention kernels; "
            f"fitted by `python -m hwmodels.derive {system} {gpu['name']}`; elementwise: the constants of its system.yaml"
        ),
        "gemm": {dtype: fit_gemm(gemm, label, size, flops[dtype], bandwidth)
                 for dtype, label, size in (("bf16", "bfloat16", 2), ("fp8", "fp8", 1))
                 if dtype in flops and (gemm.gemm_dtype == label).any()},
        "prefill_attention": fit_prefill(prefill, flops["bf16"], bandwidth),
        "decode_attention": fit_decode(decode, flops["bf16"], bandwidth),
        "elementwise": ELEMENTWISE,
        "all_reduce": fit_all_reduce(_newest(folder / system / "comm" / "vllm", "custom_allreduce_perf")[0], float(link["bytes_per_s"])),
    }  # fmt: skip


def _newest(folder: Path, table: str) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    files = sorted(folder.glob(f"*/{table}.parquet"), key=lambda path: [int(n) for n in path.parent.name.split(".")])
    if not files:
        raise InputError(str(folder), f"holds no {table}.parquet")
    return pd.read_parquet(files[-1]), files[-1].parent.name


def fit_gemm(table: pd.DataFrame, dtype: str, size: int, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + max(2mnk / (peak x ec), bytes / (bandwidth x em)) over the shapes of serving."""
    import numpy as np

    shape = table[(table.gemm_dtype == dtype) & (table.m <= 8192) & table.n.between(1024, 65536) & table.k.between(1024, 32768)]
    m, n, k = (shape[axis].to_numpy(float) for axis in "mnk")
    compute = 2 * m * n * k / peak
    memory = (size * (m * k + n * k) + 2 * m * n) / bandwidth
    return _fit(lambda x: x[0] * 1e-6 + np.maximum(compute / x[1], memory / x[2]), shape, (5.0, 0.7, 0.8),
                ("latency_s", "compute_efficiency", "memory_efficiency"))  # fmt: skip


def fit_prefill(table: pd.DataFrame, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + flops / (peak x ec) + bytes / (bandwidth x em): the two sides do not overlap in the measured kernels."""
    rows, (batch, heads, kv_heads) = _attention_rows(table)
    tokens = rows.isl.to_numpy(float)
    compute = 4 * batch * heads * 128 * tokens * (tokens + 1) / 2 / peak
    memory = batch * tokens * (2 * kv_heads + 2 * heads) * 128 * 2 / bandwidth
    return _fit(lambda x: x[0] * 1e-6 + compute / x[1] + memory / x[2], rows, (10.0, 0.6, 0.5),
                ("latency_s", "compute_efficiency", "memory_efficiency"))  # fmt: skip


def fit_decode(table: pd.DataFrame, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + max(bytes (1 + u / (sequences x KV heads)) / (bandwidth x em), flops / peak)."""
    import numpy as np

    rows, (batch, heads, kv_heads) = _attention_rows(table)
    context = rows.step.to_numpy(float) + 1
    compute = 4 * batch * context * heads * 128 / peak
    memory = (batch * context * 2 * kv_heads + batch * 2 * heads) * 128 * 2 / bandwidth
    units = batch * kv_heads
    return _fit(lambda x: x[0] * 1e-6 + np.maximum(memory / x[1] * (1 + x[2] / units), compute), rows, (10.0, 0.8, 1.0),
                ("latency_s", "memory_efficiency", "half_saturation_units"))  # fmt: skip


def fit_all_reduce(table: pd.DataFrame, link_bytes_per_s: float) -> dict[int, Fit]:
    """Fit seconds = latency + 2 (n-1)/n bytes / (link x efficiency) for each group size, inside CUDA graphs, 256 B to 64 MiB."""
    graphs = table[(table.backend == "vllm_graph") & table.message_size.between(128, 2**25)]
    fits = {}
    for gpus, rows in graphs.groupby("num_gpus"):
        seconds = 2 * (gpus - 1) / gpus * rows.message_size.to_numpy(float) * 2 / link_bytes_per_s
        fits[int(gpus)] = _fit(lambda x, s=seconds: x[0] * 1e-6 + s / x[1], rows, (5.0, 0.7), ("latency_s", "efficiency"))
    return fits


def _attention_rows(table: pd.DataFrame) -> tuple[pd.DataFrame, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Keep bf16, head size 128, full attention; return the rows with batch, query heads and KV heads."""
    import numpy as np

    keep = (table.head_dim == 128) & (table.kv_cache_dtype == "bfloat16")
    if "window_size" in table:
        keep &= table.window_size == 0
    rows = table[keep]
    heads = rows.num_heads.to_numpy(float)
    return rows, (rows.batch_size.to_numpy(float), heads, np.minimum(rows.num_key_value_heads.to_numpy(float), heads))


def _fit(predict: Callable[[Any], np.ndarray], rows: pd.DataFrame, start: tuple[float, ...], keys: tuple[str, ...]) -> Fit:
    import numpy as np
    from scipy.optimize import least_squares

    measured = rows.latency.to_numpy(float) / 1e3  # the tables are in milliseconds
    upper = [1.0 if "efficiency" in key else 1e3 for key in keys]
    lower = [0.02 if "efficiency" in key else 1e-3 if key == "latency_s" else 0.0 for key in keys]
    found = least_squares(lambda x: np.log(predict(x) / measured), start, bounds=(lower, upper), loss="soft_l1", f_scale=0.1).x
    error = float(np.median(np.abs(predict(found) / measured - 1)))
    values = dict(zip(keys, found)) | ({"median_error": error} if "efficiency" not in keys else {})
    return {key: float(f"{value * (1e-6 if key == 'latency_s' else 1):.4g}") for key, value in values.items()}


def main(arguments: list[str]) -> int:
    """Print the kernel set of SYSTEM (a folder of the wheel) as YAML, fitted against the datasheet of catalogue entry GPU."""
    if len(arguments) != 2:
        print("usage: python -m hwmodels.derive SYSTEM GPU", file=sys.stderr)
        return 2
    try:
        gpu, _ = read_entry("gpus", arguments[1], "GPU")
        print(yaml.safe_dump(derive(silicon_folder(), gpu, arguments[0], arguments[1]), sort_keys=False, width=140), end="")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
