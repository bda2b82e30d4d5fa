"""Replays an MLPerf Inference run: settings.yaml with LoadGen's summaries of the server and the offline scenario beside it.

The data set's lengths are not in the summaries. Outputs: log-normal, their mean the tokens per sample, their median the median
latency less the median first token over the median time per token, at most the 1,024 of the rules. Prompts: the mean of the
benchmark's OpenOrca set, 294 tokens as Llama 2 counts (MLCommons' description of the benchmark), 15 % fewer as Llama 3 does
(Meta's announcement of its tokenizer); both from memory. Their spread moves nothing at this load.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import InputError
from validate.importers import loadgen
from validate.importers.imported import Imported
from validate.importers.source import Source
from validate.measured.row import NOTHING, Row, row

PROMPT_TOKENS, PROMPT_SIGMA, LONGEST = 250, 0.6, 1024
SERVER_S = 600.0  # LoadGen's least duration
OFFLINE_SAMPLES = 66_000
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
    """Return the errors of throughput and of the latencies that the summaries state."""
    if "server" not in submission.summaries:
        raise InputError(str(submission.folder), "has no summary of the server scenario", "the output lengths follow from it")
    lengths = output_lengths(submission.summaries["server"])
    result = []
    for name, summary in submission.summaries.items():
        simulated = _simulate(submission, name, summary, lengths)
        dataset, engine = f"{submission.folder.name}/{name}", str(submission.settings["engine"])
        real_rate = summary.rates["output_tokens_per_s"]
        result.append(row(dataset, engine, simulated.words, "output_tokens_per_s", "mean", real_rate, simulated.summary["output_tokens_per_s"], NOTHING))
        for metric, statistics in STATED.items():
            for statistic in statistics:
                real = summary.stated.get(metric, {}).get(statistic)
                if real is not None:
                    result.append(row(dataset, engine, simulated.words, metric, statistic, real, simulated.summary[metric][statistic], NOTHING))
    return result


def output_lengths(server: Imported) -> dict[str, Any]:
    """The log-normal of output lengths that the server summary implies. Raises InputError where it does not tell."""
    try:
        mean = server.rates["output_tokens_per_s"] / server.rates["requests_per_s"]
        median = 1.0 + (server.stated["e2e_s"]["p50"] - server.stated["ttft_s"]["p50"]) / server.stated["tpot_s"]["p50"]
    except KeyError as error:
        raise InputError(str(server.source), f"does not state {error.args[0]}", "output lengths cannot be told without it") from None
    sigma = math.sqrt(2.0 * math.log(mean / median)) if mean > median else 0.0
    return {"dist": "lognormal", "median": median, "sigma": sigma, "max": LONGEST}


@dataclass(frozen=True, slots=True)
class _Simulated:
    summary: Mapping[str, Any]
    words: str


def _simulate(submission: Submission, name: str, summary: Imported, lengths: Mapping[str, Any]) -> _Simulated:
    from serving.scenario import from_mapping
    from sim.run import simulate

    if name == "offline":
        requests, arrivals = OFFLINE_SAMPLES, {"process": "all_at_once"}
    else:
        rate_rps = float(summary.facts["scheduled_samples_per_second"])
        requests, arrivals = int(rate_rps * SERVER_S), {"process": "poisson", "rate_rps": rate_rps}
    workload = {"requests": requests, "arrivals": arrivals, "output_tokens": dict(lengths)}
    workload["prompt_tokens"] = {"dist": "lognormal", "median": PROMPT_TOKENS * math.exp(-(PROMPT_SIGMA**2) / 2), "sigma": PROMPT_SIGMA, "max": LONGEST}
    scenario = _scenario(submission) | {"workload": workload}
    words = "silicon"
    try:
        loaded = from_mapping(scenario | {"latency": {"name": "silicon", "engine": "vllm"}})
        result = simulate(loaded, saturated_rps=1.0)
    except InputError as error:
        if "silicon" not in str(error):
            raise
        words = "roofline"
        result = simulate(from_mapping(scenario), saturated_rps=1.0)
    return _Simulated(result.summary, words)


def _scenario(submission: Submission) -> dict[str, Any]:
    settings, where = submission.settings, str(submission.folder / "settings.yaml")
    try:
        count, gpu = re.fullmatch(r"(\d+) x (\w+),.*", settings["gpus"]).groups()
        batching = {"name": "chunked_prefill", "max_batch_tokens": settings["max_num_batched_tokens"], "max_batch_seqs": settings["max_num_seqs"]}
        llm, dtype = re.fullmatch(r"(\S+?)-Instruct, (\w+)", settings["llm"]).groups()
        cache = {"memory_fraction": settings["gpu_memory_utilization"], "prefix_caching": False}
    except (KeyError, AttributeError) as error:
        raise InputError(where, f"lacks or does not state clearly: {error}", "gpus: '8 x H200, ...', llm: 'Llama-3.1-70B-Instruct, fp8'") from None
    return {
        "version": 1,
        "name": submission.folder.name,
        "llm": llm.lower(),
        "max_model_len": 2 * LONGEST,
        "cluster": {"gpu": f"{gpu.lower()}-sxm", "replicas": int(count), "weight_dtype": dtype},
        "latency": {"name": "roofline"},
        "kv_cache": cache,
        "policy": {"batching": batching, "routing": "round_robin"},
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
