"""Replays an MLPerf Inference run: settings.yaml with LoadGen's summaries of the server and the offline scenario beside it.

Prompts are those of ``openorca``. Answers: their mean is the tokens per sample; a percentile is that of the latency less the
median first token over the median time per token, at most the 1,024 of the rules; linear between percentiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from serving.errors import InputError
from serving.rng import stream
from validate.importers import loadgen
from validate.importers.imported import Imported
from validate.importers.source import Source
from validate.measured.openorca import LONGEST, arrivals, evenly
from validate.measured.row import NOTHING, Row, row

BLOCK_TOKENS = 16
DRAWS = {"server": (1, 2, 3, 4, 5)}  # near the knee the order of arrivals and lengths moves the median TPOT by more than a tenth
LEAST_S = 600.0  # LoadGen's least duration
# The README files of the submission's measurements (open/Krai/measurements/xd670_h200_x8_vllm_092) give each scenario its own limits.
# They do not give the dtype of KV entries. The offline latencies do: 10 % of the samples were left when the rate of completions rose
# by half, so that many were in flight, 920 a GPU, and a pool of 16-bit entries holds 525 (docs/accuracy.md).
KRAI = "vllm_0.9.2_llama-3.1-70b-fp8_8xh200_mlperf"
FOUND_ELSEWHERE = {
    (KRAI, "server"): {"kv_cache_dtype": "fp8"},
    (KRAI, "offline"): {"kv_cache_dtype": "fp8", "max_num_seqs": 1232, "max_num_batched_tokens": 8121},
}
STATED = {"ttft_s": ("p50", "p99"), "tpot_s": ("p50", "p99")}


@dataclass(frozen=True, slots=True)
class Submission:
    """One system with the summaries of its scenarios, by name."""

    folder: Path
    settings: Mapping[str, Any]
    summaries: Mapping[str, Imported]


def find(root: Path) -> list[Submission]:
    """Return the submissions under ``root``. Raises InputError for a summary that is damaged or lacks its settings."""
    found: dict[Path, dict[str, Imported]] = {}
    for path in sorted(root.rglob("*summary.txt")):
        source = Source(path)
        if loadgen.matches(source):
            summary = loadgen.read(source)
            found.setdefault(path.parent, {})[str(summary.facts.get("scenario", "")).lower()] = summary
    return [Submission(folder, _settings(folder), summaries) for folder, summaries in found.items() if (folder / "settings.yaml").exists()]


def rows(submission: Submission) -> list[Row]:
    """Return the errors of throughput and of the latencies that the summaries state, simulated values being the median of the draws."""
    if "server" not in submission.summaries:
        raise InputError(str(submission.folder), "has no summary of the server scenario", "the output lengths follow from it")
    lengths = output_lengths(submission.summaries["server"])
    result = []
    for name, summary in submission.summaries.items():
        draws = [_simulate(submission, name, summary, lengths, seed) for seed in DRAWS.get(name, (1,))]
        dataset, engine, words = f"{submission.folder.name}/{name}", str(submission.settings["engine"]), draws[0].words
        rate = median(draw.summary["output_tokens_per_s"] for draw in draws)
        result.append(row(dataset, engine, words, "output_tokens_per_s", "mean", summary.rates["output_tokens_per_s"], rate, NOTHING))
        for metric, statistics in STATED.items():
            for statistic in statistics:
                real = summary.stated.get(metric, {}).get(statistic)
                if real is not None:
                    simulated = median(draw.summary[metric][statistic] for draw in draws)
                    result.append(row(dataset, engine, words, metric, statistic, real, simulated, NOTHING))
    return result


def output_lengths(server: Imported) -> tuple[list[float], list[float]]:
    """Return the shares and the quantiles of output lengths that the server summary implies, the mean kept. Raises InputError where
    it does not tell."""
    try:
        mean = server.rates["output_tokens_per_s"] / server.rates["requests_per_s"]
        latency, first, each = server.stated["e2e_s"], server.stated["ttft_s"]["p50"], server.stated["tpot_s"]["p50"]
        known = [min(1.0 + (latency[name] - first) / each, LONGEST) for name in ("p50", "p90", "p95", "p99", "max")]
    except KeyError as error:
        raise InputError(str(server.source), f"does not state {error.args[0]}", "output lengths cannot be told without it") from None
    shares = [0.5, 0.9, 0.95, 0.99, 1.0]
    upper = sum((q - p) * (a + b) / 2 for p, q, a, b in zip(shares, shares[1:], known, known[1:]))
    least = 4.0 * (mean - upper) - known[0]  # the lower half is 0.5 (least + median) / 2
    return [0.0, *shares], [min(max(least, 1.0), known[0]), *known]


def samples(summary: Imported, rate_rps: float) -> int:
    """Return how many samples LoadGen asked for: what its least duration needs, rounded up to whole passes over the data set, as
    ``sample_concatenate_permutation`` does (73,728 in both scenarios by the detailed logs of this submission). Raises InputError where
    the summary does not say how large the set is."""
    once = int(summary.facts.get("performance_sample_count") or 0)
    if once < 1:
        raise InputError(str(summary.source), "does not state performance_sample_count", "the number of samples follows from it")
    return once * math.ceil(rate_rps * LEAST_S / once)


@dataclass(frozen=True, slots=True)
class _Simulated:
    summary: Mapping[str, Any]
    words: str


def _simulate(submission: Submission, name: str, summary: Imported, lengths: tuple[list[float], list[float]], seed: int) -> _Simulated:
    from serving.scenario import from_mapping
    from sim.run import simulate

    draws = stream(seed, f"mlperf.{name}")
    if name == "offline":
        times = [0.0] * samples(summary, summary.rates["requests_per_s"])
    else:
        rate_rps = float(summary.facts["scheduled_samples_per_second"])
        gaps = draws.exponential(size=samples(summary, rate_rps))
        times = (np.cumsum(gaps) * (len(gaps) / rate_rps / gaps.sum())).tolist()  # the rate stated is the one that came about
    answers = np.rint(np.interp(evenly(len(times), draws), *lengths)).astype(int).tolist()
    requests = arrivals(times, answers, BLOCK_TOKENS, seed)
    scenario = _scenario(submission, name)
    words = "silicon"
    try:
        loaded = from_mapping(scenario | {"latency": {"name": "silicon", "engine": "vllm"}})
        result = simulate(loaded, arrivals=requests, saturated_rps=1.0)
    except InputError as error:
        if "silicon" not in str(error):
            raise
        words = "roofline"
        result = simulate(from_mapping(scenario), arrivals=requests, saturated_rps=1.0)
    return _Simulated(result.summary, words)


def _scenario(submission: Submission, name: str) -> dict[str, Any]:
    settings = {**submission.settings, **FOUND_ELSEWHERE.get((submission.folder.name, name), {})}
    where = str(submission.folder / "settings.yaml")
    try:
        count, gpu = re.fullmatch(r"(\d+) x (\w+),.*", settings["gpus"]).groups()
        limits = {"max_batch_tokens": settings["max_num_batched_tokens"], "max_batch_seqs": settings["max_num_seqs"]}
        llm, dtype = re.fullmatch(r"(\S+?)-Instruct, (\w+)", settings["llm"]).groups()
        cache = {"memory_fraction": settings["gpu_memory_utilization"], "dtype": settings.get("kv_cache_dtype", "auto")}
    except (KeyError, AttributeError) as error:
        hint = "gpus: '8 x H200, ...', llm: 'Llama-3.1-70B-Instruct, fp8'"
        raise InputError(where, f"lacks or does not state clearly: {error}", hint) from None
    return {
        "version": 1,
        "name": submission.folder.name,
        "llm": llm.lower(),
        "max_model_len": 2 * LONGEST,
        "cluster": {"gpu": f"{gpu.lower()}-sxm", "replicas": int(count), "weight_dtype": dtype},
        "latency": {"name": "roofline"},
        "kv_cache": {**cache, "prefix_caching": True, "block_tokens": BLOCK_TOKENS},
        "policy": {"batching": {"name": "chunked_prefill", **limits}, "routing": "round_robin"},
        "workload": {"requests": 1, "arrivals": {"process": "all_at_once"}, "prompt_tokens": 1, "output_tokens": 1},
    }


def _settings(folder: Path) -> Mapping[str, Any]:
    import yaml

    path = folder / "settings.yaml"
    try:
        settings = yaml.safe_load(Source(path).text)
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise InputError(str(path), "is no mapping of settings")
    return settings
