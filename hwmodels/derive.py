"""Fit the kernel sets of the catalogue to measured operators.

    pip install 'twinserve[silicon]' && python -m hwmodels.derive h100_sxm h100-sxm > hwmodels/catalog/kernels/h100-sxm.yaml

reads the operator timings that the Apache-2.0 wheel ``aiconfigurator-core`` ships for one system and fits, per kernel
family, seconds = latency + work / (datasheet rate x efficiency), with efficiencies held at or below one. Given the folder of
a layer-wise profile (LLMServingSim's format, Llama-3.1-8B) in place of the system, it reads that. The loss is the logarithm
of predicted / measured, softened against outliers, so that microseconds and milliseconds count alike. Rows faster than the
datasheet are left out: their data sat in the cache between repetitions, as a serving step's does not.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving.catalog import read_entry
from serving.errors import InputError
from serving.llm import WEIGHT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pandas as pd

Fit = dict[str, float]
PROFILED_MATRICES = {"qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096), "down_proj": (4096, 14336)}
PROFILED_HEADS, PROFILED_KV_HEADS = 32, 8  # of the profile: Llama-3.1-8B
EXPERT_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_block", "mxfp4": "w4a16_mxfp4"}  # fp8 checkpoints of experts have scales by block
ELEMENTWISE = {"latency_s": 3.0e-06, "memory_efficiency": 0.8}  # mem_empirical_constant_latency, mem_bw_empirical_scaling_factor


def silicon_folder() -> Path:
    """Return the data folder of the installed wheel. Raises InputError when it is not installed."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise InputError("hwmodels.derive", "the wheel aiconfigurator-core is not installed", "pip install 'twinserve[silicon]'")
    return Path(spec.origin).parent / "systems" / "data"


def derive(folder: Path, gpu: dict[str, Any], system: str) -> dict[str, Any]:
    """Return the kernel set of ``system``, fitted against the datasheet rates in ``gpu``."""
    bandwidth = float(gpu["memory_bytes_per_s"])
    flops = {dtype: float(rate) for dtype, rate in gpu["flops"].items()}
    gemm, gemm_version = _newest(folder / system / "gemm" / "vllm", "gemm_perf")
    prefill, version = _newest(folder / system / "attention" / "vllm", "context_attention_perf")
    decode, _ = _newest(folder / system / "attention" / "vllm", "generation_attention_perf")
    link = gpu.get("scale_up") or gpu["pcie"]
    experts, also = _experts(folder / system / "moe" / "vllm", flops, bandwidth)
    return {
        "name": gpu["kernels"],
        "source": (
            f"aiconfigurator-core 0.12.0 (Apache-2.0), systems/data/{system}, vLLM {gemm_version} GEMM and {version} attention kernels{also}; "
            f"fitted by `python -m hwmodels.derive {system} {gpu['name']}`; elementwise: the constants of its system.yaml"
        ),
        "gemm": {dtype: fit_gemm(gemm[gemm.gemm_dtype == label], size, flops[dtype], bandwidth)
                 for dtype, label, size in (("bf16", "bfloat16", 2), ("fp8", "fp8", 1))
                 if dtype in flops and (gemm.gemm_dtype == label).any()},
        "prefill_attention": fit_prefill(_attention_rows(prefill).rename(columns={"isl": "new"}), flops["bf16"], bandwidth),
        "decode_attention": fit_decode(_attention_rows(decode), flops["bf16"], bandwidth),
        "elementwise": ELEMENTWISE,
        **({"experts": experts} if experts else {}),
        "link": link["kind"],
        "all_reduce": fit_all_reduce(_newest(folder / system / "comm" / "vllm", "custom_allreduce_perf")[0], float(link["bytes_per_s"])),
    }  # fmt: skip


def derive_from_profile(folder: Path, gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel set of a layer-wise profile: ``dense.csv`` and ``attention.csv``, microseconds, one GPU, bf16."""
    import pandas as pd

    bandwidth, peak = float(gpu["memory_bytes_per_s"]), float(gpu["flops"]["bf16"])
    dense, attention = pd.read_csv(folder / "dense.csv"), pd.read_csv(folder / "attention.csv")
    shapes = pd.DataFrame.from_dict(PROFILED_MATRICES, orient="index", columns=["n", "k"])
    gemm = dense.join(shapes, on="layer", how="inner").assign(m=lambda rows: rows.tokens, latency=lambda rows: rows.time_us / 1e3)
    heads = {"num_heads": PROFILED_HEADS, "num_key_value_heads": PROFILED_KV_HEADS}
    attention = attention.assign(latency=attention.time_us / 1e3, **heads)
    prefill = attention[(attention.n_decode == 0) & (attention.prefill_chunk >= 128)]
    decode = attention[attention.prefill_chunk == 0]
    return {
        "name": gpu["kernels"],
        "source": (
            f"layer-wise profile of Llama-3.1-8B under vLLM 0.19 on {gpu['description']} (LLMServingSim, MIT); "
            f"fitted by `python -m hwmodels.derive PROFILE_FOLDER {gpu['name']}`; elementwise: the constants of aiconfigurator's l40s.yaml"
        ),
        "gemm": {"bf16": fit_gemm(gemm, 2, peak, bandwidth)},
        "prefill_attention": fit_prefill(prefill.assign(batch_size=1).rename(columns={"prefill_chunk": "new", "kv_prefill": "before"}),
                                         peak, bandwidth),
        "decode_attention": fit_decode(decode.assign(step=decode.kv_decode - 1).rename(columns={"n_decode": "batch_size"}),
                                       peak, bandwidth),
        "elementwise": ELEMENTWISE,
    }  # fmt: skip


def _newest(folder: Path, table: str) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    files = sorted(folder.glob(f"*/{table}.parquet"), key=lambda path: [int(n) for n in path.parent.name.split(".")])
    if not files:
        raise InputError(str(folder), f"holds no {table}.parquet")
    return pd.read_parquet(files[-1]), files[-1].parent.name


def fit_gemm(table: pd.DataFrame, size: int, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + max(2mnk / (peak x ec), bytes / (bandwidth x em)) over the shapes of serving, ``size`` bytes a weight."""
    import numpy as np

    rows = table[(table.m <= 8192) & table.n.between(1024, 65536) & table.k.between(1024, 32768)]
    m, n, k = (rows[axis].to_numpy(float) for axis in "mnk")
    compute = 2 * m * n * k / peak
    memory = (size * (m * k + n * k) + 2 * m * n) / bandwidth
    return _fit(lambda x: x[0] * 1e-6 + np.maximum(compute / x[1], memory / x[2]), rows, np.maximum(compute, memory), (5.0, 0.7, 0.8),
                ("latency_s", "compute_efficiency", "memory_efficiency"))  # fmt: skip


def _experts(folder: Path, flops: dict[str, float], bandwidth: float) -> tuple[dict[str, Fit], str]:
    """Fit the expert kernels by weight dtype, where tokens were dealt out evenly: there it is known how many experts were touched.

    Also returns what to say of them in the source.
    """
    if not folder.is_dir():
        return {}, ""
    table, version = _newest(folder, "moe_perf")
    even = table[(table.distribution == "balanced") & (table.moe_ep_size == 1) & (table.moe_tp_size <= 8) & (table.num_tokens <= 8192)]
    fits = {}
    for dtype, label in EXPERT_DTYPES.items():
        rows = even[even.moe_dtype == label]
        if len(rows) and (dtype != "fp8" or dtype in flops):
            fits[dtype] = fit_experts(rows, WEIGHT_BYTES[dtype], flops.get(dtype, flops["bf16"]), bandwidth)
    return fits, f", {version} expert kernels" if fits else ""


def fit_experts(rows: pd.DataFrame, size: float, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + flops / (peak x ec) + bytes / (bandwidth x em) of a layer's gated experts, ``size`` bytes a weight.

    The latency is that of the whole operator: routing, both grouped products, activation and sum.
    """
    import numpy as np

    hidden, experts, routed = (rows[name].to_numpy(float) for name in ("hidden_size", "num_experts", "num_tokens"))
    routed = routed * rows.topk.to_numpy(float)
    inner = np.ceil(rows.inter_size.to_numpy(float) / rows.moe_tp_size.to_numpy(float))
    weights = 3 * hidden * inner
    compute = 2 * routed * weights / peak
    memory = (np.minimum(routed, experts) * weights * size + routed * (2 * hidden + 3 * inner) * 2) / bandwidth
    return _fit(lambda x: x[0] * 1e-6 + compute / x[1] + memory / x[2], rows, np.maximum(compute, memory), (20.0, 0.5, 0.6),
                ("latency_s", "compute_efficiency", "memory_efficiency"))  # fmt: skip


def fit_prefill(rows: pd.DataFrame, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + flops / (peak x ec) + bytes / (bandwidth x em): the two sides do not overlap in the measured kernels."""
    import numpy as np

    batch, heads, kv_heads = _heads(rows)
    new = rows.new.to_numpy(float)
    before = rows.before.to_numpy(float) if "before" in rows else np.zeros(len(rows))
    compute = 4 * batch * heads * 128 * new * (before + (new + 1) / 2) / peak
    memory = batch * ((before + new) * 2 * kv_heads + new * 2 * heads) * 128 * 2 / bandwidth
    return _fit(lambda x: x[0] * 1e-6 + compute / x[1] + memory / x[2], rows, np.maximum(compute, memory), (10.0, 0.6, 0.5),
                ("latency_s", "compute_efficiency", "memory_efficiency"))  # fmt: skip


def fit_decode(rows: pd.DataFrame, peak: float, bandwidth: float) -> Fit:
    """Fit seconds = latency + max(bytes (1 + u / (sequences x KV heads)) / (bandwidth x em), flops / peak)."""
    import numpy as np

    batch, heads, kv_heads = _heads(rows)
    context = rows.step.to_numpy(float) + 1
    compute = 4 * batch * context * heads * 128 / peak
    memory = (batch * context * 2 * kv_heads + batch * 2 * heads) * 128 * 2 / bandwidth
    units = batch * kv_heads
    return _fit(lambda x: x[0] * 1e-6 + np.maximum(memory / x[1] * (1 + x[2] / units), compute), rows, np.maximum(compute, memory),
                (10.0, 0.8, 1.0), ("latency_s", "memory_efficiency", "half_saturation_units"))  # fmt: skip


def fit_all_reduce(table: pd.DataFrame, link_bytes_per_s: float) -> dict[int, Fit]:
    """Fit seconds = latency + 2 (n-1)/n bytes / (link x efficiency) for each group size, inside CUDA graphs, 256 B to 64 MiB."""
    graphs = table[(table.backend == "vllm_graph") & table.message_size.between(128, 2**25)]
    fits = {}
    for gpus, rows in graphs.groupby("num_gpus"):
        seconds = 2 * (gpus - 1) / gpus * rows.message_size.to_numpy(float) * 2 / link_bytes_per_s
        fits[int(gpus)] = _fit(lambda x, s=seconds: x[0] * 1e-6 + s / x[1], rows, seconds, (5.0, 0.7), ("latency_s", "efficiency"))
    return fits


def _attention_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Keep bf16, head size 128, full attention."""
    keep = (table.head_dim == 128) & (table.kv_cache_dtype == "bfloat16")
    return table[keep & (table.window_size == 0)] if "window_size" in table else table[keep]


def _heads(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return batch, query heads and KV heads of each row."""
    import numpy as np

    heads = rows.num_heads.to_numpy(float)
    return rows.batch_size.to_numpy(float), heads, np.minimum(rows.num_key_value_heads.to_numpy(float), heads)


def _fit(predict: Callable[[Any], np.ndarray], rows: pd.DataFrame, bound_s: np.ndarray, start: tuple[float, ...],
         keys: tuple[str, ...]) -> Fit:  # fmt: skip
    """Fit ``predict`` (of latency in microseconds and the other ``keys``) to the rows that are no faster than ``bound_s``."""
    import numpy as np
    from scipy.optimize import least_squares

    measured = rows.latency.to_numpy(float) / 1e3  # the tables are in milliseconds
    kept = measured >= bound_s
    upper = [1.0 if "efficiency" in key else 1e3 for key in keys]
    lower = [0.02 if "efficiency" in key else 1e-3 if key == "latency_s" else 0.0 for key in keys]
    found = least_squares(lambda x: np.log(predict(x) / measured)[kept], start, bounds=(lower, upper), loss="soft_l1", f_scale=0.1).x
    values = dict(zip(keys, found))
    if "efficiency" not in keys:
        values["median_error"] = float(np.median(np.abs(predict(found) / measured - 1)[kept]))
    return {key: float(f"{value * (1e-6 if key == 'latency_s' else 1):.4g}") for key, value in values.items()}


def main(arguments: list[str]) -> int:
    """Print a kernel set as YAML: SYSTEM is a folder of the wheel or the folder of a profile, GPU a catalogue entry."""
    if len(arguments) != 2:
        print("usage: python -m hwmodels.derive SYSTEM|PROFILE_FOLDER GPU", file=sys.stderr)
        return 2
    source, name = arguments
    try:
        gpu, _ = read_entry("gpus", name, "GPU")
        profile = Path(source)
        fitted = derive_from_profile(profile, gpu) if (profile / "dense.csv").is_file() else derive(silicon_folder(), gpu, source)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(yaml.safe_dump(fitted, sort_keys=False, width=140), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
