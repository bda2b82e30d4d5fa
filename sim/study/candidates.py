"""The candidates of a plan: every combination of what may be chosen, and why some can't work at all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.errors import InputError
from serving.llm import Llm
from serving.scenario import Scenario, from_mapping
from serving.scenario.planning import Plan
from sim.study.vary import override

# field of plan.candidates -> (key in a plan's config, dotted path of the scenario)
_PATHS = {
    "llms": ("llm", "llm"), "gpus": ("gpu", "cluster.gpu"), "tensor_parallel": ("tensor_parallel", "cluster.tensor_parallel"),
    "weight_dtype": ("weight_dtype", "cluster.weight_dtype"), "kv_dtype": ("kv_dtype", "kv_cache.dtype"),
    "max_batch_tokens": ("max_batch_tokens", "policy.batching.max_batch_tokens"), "max_batch_seqs": ("max_batch_seqs", "policy.batching.max_batch_seqs"),
    "max_chunk_tokens": ("max_chunk_tokens", "policy.batching.max_chunk_tokens"), "block_tokens": ("block_tokens", "kv_cache.block_tokens"),
    "memory_fraction": ("memory_fraction", "kv_cache.memory_fraction"),
}  # fmt: skip
_ALWAYS = ("llm", "gpu", "tensor_parallel", "weight_dtype")  # in a config even when there is no choice
_WHERE = {"cluster.tensor_parallel": "tensor_parallel", "cluster": "gpu_memory", "max_model_len": "max_model_len"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration, of which a fleet has as many replicas as it takes.

    ``config`` is what was chosen, ``scenario`` the resolved scenario of one replica (one group of pools) as plain data.
    ``refused`` is empty, or the limit that rules it out: 'limit: reason'.
    """

    index: int
    config: dict[str, Any]
    settings: dict[str, Any]  # dotted path -> value, to reproduce it with `run --set`
    scenario: dict[str, Any]
    gpus_per_replica: int = 0
    usd_per_replica_h: float = 0.0
    memory_bytes_per_s: float = 0.0  # of one replica's GPUs together
    flops: float = 0.0  # of one replica's GPUs together, for its weights' dtype
    kv_tokens: int = 0  # that one replica holds
    quality: float | None = None
    doubts: tuple[str, ...] = ()  # GPUs of which the catalogue is not highly confident, each with its confidence
    refused: str = ""

    def max_replicas(self, plan: Plan) -> int:
        """Replicas that the range and the budget allow."""
        if plan.budget_usd_per_h is None:
            return plan.replicas.max
        return min(plan.replicas.max, math.floor(plan.budget_usd_per_h / self.usd_per_replica_h + 1e-9))


def with_replicas(scenario: Scenario, replicas: int) -> Scenario:
    """The fleet of so many replicas; with pools, of so many groups of them."""
    cluster = scenario.cluster
    if cluster.pools:
        pools = tuple(pool.model_copy(update={"replicas": pool.replicas * replicas}) for pool in cluster.pools)
        return scenario.model_copy(update={"cluster": cluster.model_copy(update={"pools": pools})})
    return scenario.model_copy(update={"cluster": cluster.model_copy(update={"replicas": replicas})})


def enumerate_candidates(base: Scenario, folder: Path | None = None) -> list[Candidate]:
    """Every candidate of ``base.plan`` in order, the last choice fastest.

    Raises InputError for a choice that is a mistake (an unknown name, a wrong type); one that is merely impossible is a
    candidate with the limit that refuses it.
    """
    plan = base.plan
    if plan is None:
        raise InputError("plan", "this scenario has no plan section", "name what may be chosen, at least plan.candidates.gpus")
    raw = base.resolved()
    raw.pop("plan")
    raw["cluster"]["replicas"] = 1
    choices = list(_choices(plan))
    found = []
    for index, combination in enumerate(itertools.product(*(values for _, _, values in choices))):
        named = [(key, path, value) for (key, path, _), value in zip(choices, combination)]
        settings = {path: value for _, path, value in named}
        try:
            scenario = from_mapping(raw, [override(path, value) for path, value in settings.items()], folder=folder)
        except InputError as error:
            raise InputError(error.where.replace("--set ", "plan.candidates: "), error.problem, error.hint) from None
        found.append(_candidate(index, scenario, {key: value for key, _, value in named}, settings, plan))
    return found


def _choices(plan: Plan) -> Iterator[tuple[str, str, tuple]]:
    """Yield (key, dotted path, values) of everything that may be chosen."""
    for field, (key, path) in _PATHS.items():
        values = getattr(plan.candidates, field)
        if values is not None:
            yield key, path, tuple(dict.fromkeys(each.name for each in values) if field == "gpus" else dict.fromkeys(values))
    for path, values in plan.candidates.other.items():
        yield path, path, values


def varied(plan: Plan) -> list[str]:
    """Keys of a config that take more than one value."""
    return [key for key, _, values in _choices(plan) if len(values) > 1]


def _candidate(index: int, scenario: Scenario, chosen: dict[str, Any], settings: dict[str, Any], plan: Plan) -> Candidate:
    from sim.fleet import resolve_fleet

    always = {"llm": scenario.llm, "gpu": scenario.cluster.gpu, "tensor_parallel": scenario.cluster.tensor_parallel,
              "weight_dtype": scenario.cluster.weight_dtype}  # fmt: skip
    config = {**{key: always[key] for key in _ALWAYS}, **chosen}
    plain = Candidate(index, config, settings, scenario.resolved())
    limit = _batch_limit(scenario)
    if limit:
        return _refuse(plain, limit)
    try:
        parts = resolve_fleet(scenario)
    except InputError as error:
        if error.where.startswith(("cluster.gpu", "llm", "policy", "latency")):
            raise
        return _refuse(plain, f"{_WHERE.get(error.where, error.where)}: {error.problem}" + (f" ({error.hint})" if error.hint else ""))
    prices = {gpu.name: gpu.price_usd_per_h for gpu in plan.candidates.gpus or ()}
    usd, bytes_per_s, flops, gpus, tokens = 0.0, 0.0, 0.0, 0, 0
    for part in parts.values():
        tensor_parallel, link = part.scenario.cluster.tensor_parallel, part.gpu.scale_up
        if link is not None and tensor_parallel > link.gpus:
            return _refuse(plain, f"tensor_parallel: {tensor_parallel} GPUs exceed the {link.gpus} that {link.kind} joins on {part.gpu.name}")
        price = prices.get(part.scenario.cluster.gpu) or part.gpu.price_usd_per_h
        if price is None:
            return _refuse(plain, f"price: {part.gpu.name} has none in the catalogue; give {{name: {part.gpu.name}, price_usd_per_h: ...}}")
        dtype = part.llm.dtype_of_weights(None if scenario.cluster.weight_dtype == "auto" else scenario.cluster.weight_dtype)
        gpus += part.gpus
        usd += part.gpus * price
        bytes_per_s += part.gpus * part.gpu.memory_bytes_per_s
        flops += part.gpus * part.gpu.peak_flops(dtype)
        tokens += part.capacity.usable_blocks * part.scenario.kv_cache.block_tokens * part.scenario.cluster.replicas
    made = Candidate(index, config, settings, plain.scenario, gpus, usd, bytes_per_s, flops, tokens, _quality(scenario, part.llm, dtype, plan.quality),
                     tuple(dict.fromkeys(f"{part.gpu.name} ({part.gpu.confidence})" for part in parts.values() if part.gpu.confidence != "high")))  # fmt: skip
    budget = made.max_replicas(plan)
    if budget < plan.replicas.min:
        return _refuse(made, f"budget: {plan.replicas.min} replicas cost ${plan.replicas.min * usd:,.2f} an hour, the budget is ${plan.budget_usd_per_h:,.2f}")
    return made


def _refuse(candidate: Candidate, limit: str) -> Candidate:
    from dataclasses import replace

    return replace(candidate, refused=limit)


def _batch_limit(scenario: Scenario) -> str:
    """The limit that batch settings break by themselves; empty when they can work."""
    batching = scenario.policy.batching
    tokens, seqs, chunk = batching.max_batch_tokens, batching.max_batch_seqs, batching.max_chunk_tokens
    if seqs > tokens:
        return f"max_batch_tokens: {tokens} tokens a step leave some of {seqs} sequences without one"
    if chunk is not None and chunk > tokens:
        return f"max_chunk_tokens: a chunk of {chunk} tokens exceeds the {tokens} of a step"
    return ""


def _quality(scenario: Scenario, llm: Llm, dtype: str, scores: Mapping[str, float]) -> float | None:
    """The score of what was chosen. Raises InputError when some have one and this has none."""
    if not scores:
        return None
    known = (f"{scenario.llm} {dtype}", dtype, scenario.llm)
    for name in known:
        if name in scores:
            return scores[name]
    raise InputError("plan.quality", f"has no score for '{dtype}' of {llm.name}", f"give '{dtype}' or '{known[0]}'")


def short_name(config: Mapping[str, Any], replicas: int | None, keys: list[str]) -> str:
    """A fleet in a few words: replicas, GPU, TP, and whatever else was chosen among several."""
    from pathlib import PurePath

    head = f"{replicas} x " if replicas else ""
    text = f"{head}{PurePath(str(config['gpu'])).stem} TP{config['tensor_parallel']}"
    shown = {"weight_dtype": "", "llm": "", "kv_dtype": "kv ", "max_batch_tokens": "tokens ", "max_batch_seqs": "seqs ", "max_chunk_tokens": "chunk ",
             "block_tokens": "block ", "memory_fraction": "memory "}  # fmt: skip
    for key in keys:
        if key not in ("gpu", "tensor_parallel"):
            value = "none" if config[key] is None else config[key]
            text += f", {shown.get(key, key.split('.')[-1] + ' ')}{value}"
    return text
