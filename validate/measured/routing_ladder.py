"""Replays a ladder of request rates over several routing policies: <n>-capacity.csv with workload.yaml beside it.

Each stage is simulated alone behind the warm-up stage, after which the fleet empties and keeps its prefix caches, as the load
generator waits for a stage's answers before it begins the next. Arrivals are taken as Poisson and the prompts as drawn evenly.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving.errors import InputError
from serving.request import Arrival, Request
from serving.rng import stream
from validate.importers.source import Source, number
from validate.measured.row import NOTHING, Progress, Row, row

BLOCK_TOKENS = 16
SEED = 1
SETTLED_S = 300.0  # from the end of the warm-up to the measured stage
LRU_BLOCKS = 31_250  # that the estimating scorer remembers for each server, its default
SCORERS = "validate.measured.scorers"
POLICIES: dict[str, dict[str, Any]] = {
    "precise-scheduling": {"name": f"{SCORERS}:Scored", "prefix_weight": 2.0, "load_weight": 2.0},  # remembers as much as a pod holds
    "default-scheduling": {"name": f"{SCORERS}:Scored", "prefix_weight": 2.0, "load_weight": 2.0, "blocks_per_replica": LRU_BLOCKS},
    "load-scheduling": {"name": "least_outstanding_tokens"},
    "random-scheduling": {"name": f"{SCORERS}:Random"},
}
DISTINCT = 0.10  # measured TTFT of two policies that differ by less than this have no order


@dataclass(frozen=True, slots=True)
class Stage:
    """One measured policy at one rate."""

    policy: str
    rate_rps: float
    ttft_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Ladder:
    """The measured stages, how long each rate lasted, and the workload."""

    folder: Path
    stages: tuple[Stage, ...]
    seconds: Mapping[float, float]
    warm_up: tuple[float, float]  # rate, seconds
    prefix: Mapping[str, int]
    kv_tokens: int


def find(root: Path) -> list[Ladder]:
    """Return the ladders under ``root``. Raises InputError for one that cannot be read."""
    paths = [path for path in sorted(root.rglob("*capacity.csv")) if (path.parent / "workload.yaml").exists()]
    return [_read(path) for path in paths]


def rows(ladder: Ladder, progress: Progress | None = None) -> list[Row]:
    """Return mean TTFT and output rate of every stage, and the highest output rate of each policy over the ladder."""
    result, name = [], ladder.folder.name
    best: dict[str, list[tuple[float, float]]] = {}
    for done, stage in enumerate(ladder.stages):
        ttft_s, tokens_per_s = simulate_stage(ladder, stage)
        dataset = f"{name}/{stage.policy}/{stage.rate_rps:g} rps"
        result.append(_row(dataset, "ttft_s", stage.ttft_s, ttft_s))
        result.append(_row(dataset, "output_tokens_per_s", stage.output_tokens_per_s, tokens_per_s))
        best.setdefault(stage.policy, []).append((stage.output_tokens_per_s, tokens_per_s))
        if progress is not None:
            progress(done + 1, len(ladder.stages))
    result += [_row(f"{name}/saturation/{policy}", "output_tokens_per_s", *(max(column) for column in zip(*pairs))) for policy, pairs in best.items()]
    return result


def orders(found: list[Row]) -> list[tuple[str, str, str, bool]]:
    """Return (rate, faster policy, slower policy, simulated in that order too) of each pair whose measured TTFT differs by more than 10 %."""
    by_rate: dict[str, list[tuple[str, Row]]] = {}
    for each in found:
        _, policy, rate = each.dataset.split("/")
        if each.metric == "ttft_s":
            by_rate.setdefault(rate, []).append((policy, each))
    result = []
    for rate, members in by_rate.items():
        for (one, first), (other, second) in itertools.combinations(members, 2):
            if abs(first.real - second.real) > DISTINCT * min(first.real, second.real):
                faster, slower = (one, other) if first.real < second.real else (other, one)
                result.append((rate, faster, slower, (first.real < second.real) == (first.simulated < second.simulated)))
    return result


def simulate_stage(ladder: Ladder, stage: Stage) -> tuple[float, float]:
    """Return the simulated mean TTFT and output tokens per second of the stage."""
    from serving.scenario import from_mapping
    from sim.run import simulate

    begin_s = ladder.warm_up[1] + SETTLED_S
    scenario = from_mapping(_scenario(ladder, stage, begin_s))
    arrivals = [*_arrivals(ladder, ladder.warm_up[0], 0.0, ladder.warm_up[1], 0)]
    arrivals += _arrivals(ladder, stage.rate_rps, begin_s, ladder.seconds[stage.rate_rps], len(arrivals))
    summary = simulate(scenario, arrivals=arrivals, saturated_rps=1.0).summary
    return summary["ttft_s"]["mean"], summary["output_tokens_per_s"]


def _row(dataset: str, metric: str, real: float, simulated: float) -> Row:
    return row(dataset, "vllm", "table (operator sample h100_sxm)", metric, "mean", real, simulated, NOTHING)


def _arrivals(ladder: Ladder, rate_rps: float, begin_s: float, seconds: float, first_id: int) -> list[Arrival]:
    """Poisson arrivals; each takes one of the prompts: its group's shared prefix and its own question."""
    prefix = ladder.prefix
    draws = stream(SEED, f"ladder.{rate_rps:g}")
    times = begin_s + np.cumsum(draws.exponential(1.0 / rate_rps, int(rate_rps * seconds)))
    prompts = draws.integers(prefix["groups"] * prefix["prompts_per_group"], size=len(times)).tolist()
    shared, whole = prefix["shared_tokens"] // BLOCK_TOKENS, (prefix["shared_tokens"] + prefix["question_tokens"]) // BLOCK_TOKENS
    tokens, output = prefix["shared_tokens"] + prefix["question_tokens"], prefix["output_tokens"]
    result = []
    for i, (time_s, prompt) in enumerate(zip(times.tolist(), prompts)):
        group = prompt // prefix["prompts_per_group"]
        keys = (*((group, block) for block in range(shared)), *((group, prompt, block) for block in range(shared, whole)))
        result.append(Arrival(Request(first_id + i, time_s, tokens, output, prefix_hashes=keys), output))
    return result


def _scenario(ladder: Ladder, stage: Stage, begin_s: float) -> dict[str, Any]:
    routing = dict(POLICIES[stage.policy])
    blocks = ladder.kv_tokens // BLOCK_TOKENS
    if ":" in routing["name"]:
        routing["replicas"] = 4
    if routing["name"].endswith("Scored"):
        routing.setdefault("blocks_per_replica", blocks)
    return {
        "version": 1,
        "name": ladder.folder.name,
        "seed": SEED,
        "llm": "llama-3.1-70b",
        "cluster": {"gpu": "h100-sxm", "replicas": 4, "tensor_parallel": 4},
        "latency": {"name": "table", "profile": str(_operators(ladder.folder))},
        "kv_cache": {"block_tokens": BLOCK_TOKENS, "blocks": blocks + 1, "prefix_caching": True},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 8192, "max_batch_seqs": 1024}, "routing": routing},
        "workload": {"requests": 1, "arrivals": {"process": "poisson", "rate_rps": stage.rate_rps}, "prompt_tokens": 1, "output_tokens": 1},
        "measure": {"warmup_s": begin_s},
    }


def _operators(folder: Path) -> Path:
    found = sorted(folder.parent.rglob("h100_sxm/gemm*.csv"))
    if not found:
        raise InputError(str(folder), "there are no operator timings of the H100 beside it", "expected <folder>/h100_sxm/gemm*.csv")
    return found[0].parent


def _read(path: Path) -> Ladder:
    import yaml

    settings_path = path.parent / "workload.yaml"
    try:
        settings = yaml.safe_load(Source(settings_path).text)
        stages = settings["stages_rps_and_seconds"]
        prefix = {key: int(settings["prefix"][key]) for key in ("groups", "prompts_per_group", "shared_tokens", "question_tokens", "output_tokens")}
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise InputError(str(settings_path), f"does not describe the workload: {error}") from None
    found = re.search(r"([\d,]+) KV tokens a pod", Source(settings_path).text)
    if found is None:
        raise InputError(str(settings_path), "does not state the KV tokens of a pod")
    measured = []
    for line, record in Source(path).csv_rows():
        if record["qps"] == "all":
            continue
        where = f"{path}:{line}"
        if record["policy"] not in POLICIES:
            raise InputError(where, f"no policy is known for '{record['policy']}'", "known: " + ", ".join(POLICIES))
        measured.append(Stage(record["policy"], number(record, "qps", where), number(record, "ttft_mean_s", where), number(record, "out_tok_s", where)))
    seconds = {float(rate): float(length) for rate, length in stages[1:]}
    return Ladder(path.parent, tuple(measured), seconds, (float(stages[0][0]), float(stages[0][1])), prefix, int(found[1].replace(",", "")))
