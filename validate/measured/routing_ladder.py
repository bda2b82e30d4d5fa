"""Replays a ladder of request rates over several routing policies: <n>-capacity.csv with workload.yaml beside it.

Each policy is simulated once, through the warm-up and all stages: the pods keep their caches and the router what it believes, and the
load generator waits for a stage's answers before it begins the next. What the folder does not say is from the sources of the load
generator (inference-perf) and from the report that the figures come from (llm-d, benchmarking/37-capacity): exponential gaps, scaled
to the stage's length; prompts shuffled once and sent in that order, from the first one in every stage; pages of 64 tokens.
"""

from __future__ import annotations

import itertools
import re
import tempfile
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

BLOCK_TOKENS = 64
SEED = 1
SETTLED_S = 900.0  # from the end of a stage's arrivals to the next stage: the fleet is idle by then
# The generator draws token ids, and what it sends is their text: Llama 3's tokenizer makes 8,349 of 8,000 and 1,044 of 1,000, of 6.24
# bytes each (means of 40 and 200 draws).
RETOKENISED = 1.044
# The estimating scorer hashes 64 bytes at a time, the first 256 such pieces of a prompt, and remembers 31,250 of them for each
# pod: its defaults.
BYTES, PIECE, PIECES, REMEMBERED = 6.24, 64, 256, 31_250
SCORERS = "validate.measured.scorers"
POLICIES: dict[str, dict[str, Any]] = {
    "precise-scheduling": {"name": f"{SCORERS}:Scored", "prefix_weight": 2.0},
    "default-scheduling": {
        "name": f"{SCORERS}:Scored",
        "prefix_weight": 2.0,
        "considered_blocks": round(PIECE * PIECES / BYTES / BLOCK_TOKENS),
        "believed_blocks": round(PIECE * REMEMBERED / BYTES / BLOCK_TOKENS),
    },
    "load-scheduling": {"name": f"{SCORERS}:Scored"},
    "random-scheduling": {"name": "random"},
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
    result, highest, name = [], [], ladder.folder.name
    policies = list(dict.fromkeys(stage.policy for stage in ladder.stages))
    for done, policy in enumerate(policies):
        simulated = simulate_policy(ladder, policy)
        best = []
        for stage in (stage for stage in ladder.stages if stage.policy == policy):
            ttft_s, tokens_per_s = simulated[stage.rate_rps]
            dataset = f"{name}/{policy}/{stage.rate_rps:g} rps"
            result.append(_row(dataset, "ttft_s", stage.ttft_s, ttft_s))
            result.append(_row(dataset, "output_tokens_per_s", stage.output_tokens_per_s, tokens_per_s))
            best.append((stage.output_tokens_per_s, tokens_per_s))
        highest.append(_row(f"{name}/saturation/{policy}", "output_tokens_per_s", *(max(column) for column in zip(*best))))
        if progress is not None:
            progress(done + 1, len(policies))
    return result + highest


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


def simulate_policy(ladder: Ladder, policy: str) -> dict[float, tuple[float, float]]:
    """Return the simulated mean TTFT and output tokens per second of each stage, by its rate."""
    from serving.scenario import from_mapping
    from sim.run import simulate
    from validate.run_data import open_run

    arrivals, stages = _arrivals(ladder)
    with tempfile.TemporaryDirectory() as folder:
        simulate(from_mapping(_scenario(ladder, policy)), arrivals=arrivals, saturated_rps=1.0, out=Path(folder) / "run")
        table = open_run(Path(folder) / "run").requests.sort_values("request_id")
        arrived_s, first_s, finished_s = (table[column].to_numpy() for column in ("arrival_s", "first_token_s", "finish_s"))
    result = {}
    for rate_rps, rows_of in stages.items():
        seconds = finished_s[rows_of].max() - arrived_s[rows_of].min()
        tokens = ladder.prefix["output_tokens"] * (rows_of.stop - rows_of.start)
        result[rate_rps] = float((first_s - arrived_s)[rows_of].mean()), float(tokens / seconds)
    return result


def _row(dataset: str, metric: str, real: float, simulated: float) -> Row:
    return row(dataset, "vllm", "table (operator sample h100_sxm)", metric, "mean", real, simulated, NOTHING)


def _arrivals(ladder: Ladder) -> tuple[list[Arrival], dict[float, slice]]:
    """Return the requests of warm-up and stages, and which of them belong to each rate's stage."""
    prefix, draws = ladder.prefix, stream(SEED, "ladder")
    shared = round(RETOKENISED * prefix["shared_tokens"])
    tokens = shared + round(RETOKENISED * prefix["question_tokens"])
    prompts = draws.permutation(prefix["groups"] * prefix["prompts_per_group"]).tolist()
    begin_s, arrivals, stages = 0.0, [], {}
    for rate_rps, seconds in (ladder.warm_up, *ladder.seconds.items()):
        first, gaps = len(arrivals), draws.exponential(size=int(rate_rps * seconds))
        for i, time_s in enumerate((begin_s + seconds * np.cumsum(gaps) / gaps.sum()).tolist()):
            prompt = prompts[i % len(prompts)]
            group = prompt // prefix["prompts_per_group"]
            common, whole = shared // BLOCK_TOKENS, tokens // BLOCK_TOKENS
            keys = (*((group, block) for block in range(common)), *((group, prompt, block) for block in range(common, whole)))
            request = Request(first + i, time_s, tokens, prefix["output_tokens"], prefix_hashes=keys)
            arrivals.append(Arrival(request, prefix["output_tokens"]))
        stages[rate_rps] = slice(first, len(arrivals))
        begin_s += seconds + SETTLED_S
    return arrivals, stages


def _scenario(ladder: Ladder, policy: str) -> dict[str, Any]:
    return {
        "version": 1,
        "name": ladder.folder.name,
        "seed": SEED,
        "llm": "llama-3.1-70b",
        "cluster": {"gpu": "h100-sxm", "replicas": 4, "tensor_parallel": 4},
        "latency": {"name": "table", "profile": str(_operators(ladder.folder))},
        "kv_cache": {"block_tokens": BLOCK_TOKENS, "blocks": ladder.kv_tokens // BLOCK_TOKENS + 1, "prefix_caching": True},
        "policy": {"batching": {"name": "chunked_prefill", "max_batch_tokens": 8192, "max_batch_seqs": 1024}, "routing": POLICIES[policy]},
        "workload": {"requests": 1, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 1, "output_tokens": 1},
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
