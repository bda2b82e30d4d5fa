"""Replays a vLLM run that stamped every request, on the operator profile of the same GPU and LLM.

A run's folder has requests.jsonl and meta.json (see validate/importers/vllm_requests.py). Its KV blocks come from meta.json
where the engine reported them, else from the memory model; its scheduler's limits from meta.json; prompt content from
``<workload>.lengths.jsonl`` beside the folder where there is one. Two plans are in flight, as in vLLM since 0.11.

Latencies count from the instant at which the engine queued a request, as its own statistics do: the first step planned after
the request came. The simulator's own instant is that at which its scheduler first planned with the request at hand.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serving import catalog
from serving.errors import InputError
from validate.importers.source import Source, number

BLOCK_TOKENS = 16
PLANS_IN_FLIGHT = 2
FIT_STEPS, FIT_TOLERANCE = 6, 2e-4
FIRST_HOST_S = 5e-4


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per request (in arrival order), from a common origin: queued, first token, last token; and its output tokens."""

    queued_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    output_tokens: np.ndarray

    def metrics(self, rows: slice) -> dict[str, np.ndarray]:
        """Return TTFT, TPOT (of requests with several tokens) and E2E of the requests in ``rows``."""
        queued_s, first_s, last_s, tokens = (x[rows] for x in (self.queued_s, self.first_s, self.last_s, self.output_tokens))
        several = tokens > 1
        return {"ttft_s": first_s - queued_s, "tpot_s": (last_s - first_s)[several] / (tokens[several] - 1), "e2e_s": last_s - queued_s}

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens over the time from the first arrival to the last token."""
        return float(self.output_tokens.sum() / (self.last_s.max() - self.queued_s.min()))


@dataclass(frozen=True, slots=True)
class VllmRun:
    """One measured run and what is needed to replay it."""

    folder: Path
    engine: str
    gpu: str
    llm: str
    profile: Path
    scenario: dict[str, Any]
    requests: list[dict[str, Any]]
    real: Times


def find(root: Path) -> list[VllmRun]:
    """Return the runs under ``root`` (or in it), in order of their path. Raises InputError for a run that cannot be replayed."""
    return [_read(path, root) for path in sorted(root.rglob("requests.jsonl")) if (path.parent / "meta.json").exists()]


def replay(run: VllmRun, *, host_step_s: float = 0.0) -> Times:
    """Simulate the run with ``host_step_s`` of exposed host time a step and return the simulated times."""
    from serving.records import open_run
    from serving.scenario import load
    from sim.run import simulate

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trace = folder / "trace.jsonl"
        trace.write_text("\n".join(json.dumps(request) for request in run.requests) + "\n")
        latency = {**run.scenario["latency"], "host_step_s": host_step_s}
        scenario = {**run.scenario, "latency": latency, "workload": {"trace": {"file": str(trace)}}}
        (folder / "scenario.yaml").write_text(json.dumps(scenario))
        simulate(load(folder / "scenario.yaml"), out=folder / "run", plans=True)
        simulated = open_run(folder / "run")
        rows = simulated.requests.sort_values("request_id")
        if (rows["status"] != "completed").any():
            raise InputError(str(run.folder), "the simulated engine does not complete every request that the real one did")
        queued = {request: plan.schedule_s for plan in simulated.plans.itertuples() for request in plan.submitted}
        queued_s = np.array([queued[request] for request in rows["request_id"]])
        return Times(queued_s, rows["first_token_s"].to_numpy(), rows["finish_s"].to_numpy(), rows["output_tokens"].to_numpy())


def fit_host_s(run: VllmRun, rows: slice) -> float:
    """Return the exposed host time per step that brings the mean E2E of ``rows`` to the measured one, by the secant method.

    It is a time: where even none of it leaves the simulated run too long, the answer is 0, and the profile is too slow.
    """
    target = float(run.real.metrics(rows)["e2e_s"].mean())

    def error(host_s: float) -> float:
        return float(replay(run, host_step_s=host_s).metrics(rows)["e2e_s"].mean()) / target - 1.0

    low_s, low = 0.0, error(0.0)
    if low >= 0:
        return 0.0
    high_s, high = FIRST_HOST_S, error(FIRST_HOST_S)
    for _ in range(FIT_STEPS):
        if abs(high) < FIT_TOLERANCE or high == low:
            break
        low_s, low, high_s = high_s, high, max(0.0, high_s - high * (high_s - low_s) / (high - low))
        high = error(high_s)
    return high_s


def _read(path: Path, root: Path) -> VllmRun:
    folder = path.parent
    meta = _json(folder / "meta.json")
    engine = meta.get("engine_kwargs") or {}
    model = str(meta.get("model") or "")
    profile, facts = _profile(folder, root, model, meta)
    gpu = _gpu_named(str(facts["gpu"]), folder)
    requests, real = _requests(path, meta)
    cache = meta.get("kv_cache") or {}
    cache_keys = {"block_tokens": int(cache.get("block_size") or BLOCK_TOKENS), "prefix_caching": bool(cache.get("enable_prefix_caching", True))}
    cache_keys["memory_fraction"] = float(cache.get("gpu_memory_utilization") or engine.get("gpu_memory_utilization") or 0.9)
    if cache.get("num_gpu_blocks"):
        cache_keys["blocks"] = int(cache["num_gpu_blocks"])
    batching = {"name": "chunked_prefill", "max_in_flight": PLANS_IN_FLIGHT}
    batching |= {"max_batch_tokens": int(number(engine, "max_num_batched_tokens", str(folder / "meta.json"))), "max_batch_seqs": int(number(engine, "max_num_seqs", str(folder / "meta.json")))}
    llm = _llm_named(model, folder)
    scenario = {
        "version": 1,
        "name": folder.name,
        "llm": llm,
        "cluster": {"gpu": gpu, "replicas": 1, "tensor_parallel": int(engine.get("tensor_parallel_size") or 1)},
        "latency": {"name": "table", "profile": str(profile.resolve())},
        "kv_cache": cache_keys,
        "policy": {"ordering": "fcfs", "batching": batching, "preemption": "latest"},
    }
    if engine.get("max_model_len"):
        scenario["max_model_len"] = int(engine["max_model_len"])
    return VllmRun(folder, f"vllm {meta.get('vllm_version', '')}".strip(), gpu, llm, profile, scenario, requests, real)


def _requests(path: Path, meta: dict[str, Any]) -> tuple[list[dict[str, Any]], Times]:
    records = [(f"{path}:{line}", record) for line, record in Source(path).lines()]
    keys = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    columns = {key: np.array([number(record, key, where) for where, record in records]) for key in keys}
    origin_s = columns["queued_ts"][0]
    real = Times(columns["queued_ts"] - origin_s, columns["first_token_ts"] - origin_s, columns["last_token_ts"] - origin_s, columns["output_toks"].astype(int))
    arrivals = columns["arrival_time"] - columns["arrival_time"][0]
    content = _content(path.parent, meta, len(records))
    requests = []
    for i, arrival_s in enumerate(arrivals.tolist()):
        request = {"arrival_s": arrival_s, "prompt_tokens": int(columns["input_toks"][i]), "output_tokens": int(columns["output_toks"][i])}
        requests.append(request | (content[i] if content else {}))
    return requests, real


def _content(folder: Path, meta: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Prefix hashes of the prompts, from the workload file beside the run's folder; empty where there is none."""
    stem = Path(str(meta.get("dataset_path") or "")).stem
    path = folder.parent / f"{stem}.lengths.jsonl"
    if not stem or not path.exists():
        return []
    lines = Source(path).lines()
    if len(lines) != count:
        raise InputError(str(path), f"has {len(lines)} requests and the run has {count}")
    return [{"hash_ids": record["hash_ids"], "hash_tokens": BLOCK_TOKENS} for _, record in lines]


def _profile(folder: Path, root: Path, model: str, meta: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the profile of the run's GPU and LLM and its meta.yaml, from a folder ``profiles`` in or above ``root``."""
    from hwmodels.profiles.layerwise import read_meta

    device = (meta.get("hardware") or {}).get("device_name")
    hardware = _hardware(folder / "config.json")
    tried = []
    for base in (root, *root.resolve().parents):
        for path in sorted((base / "profiles").rglob("meta.yaml")):
            facts = read_meta(path.parent)
            if facts.get("model") == model and (facts.get("gpu") == device or facts.get("hardware") == hardware):
                return path.parent, facts
            tried.append(str(path.parent))
        if tried:
            break
    hint = f"looked at: {', '.join(tried)}" if tried else "no folder 'profiles' beside or above the data"
    raise InputError(str(folder), f"there is no profile of {model} on {device or hardware}", hint)


def _hardware(path: Path) -> str | None:
    if not path.exists():
        return None
    return next((instance.get("hardware") for node in _json(path).get("nodes", []) for instance in node.get("instances", [])), None)


def _json(path: Path) -> dict[str, Any]:
    document = Source(path).document
    if document is None:
        raise InputError(str(path), "is no JSON object")
    return document


def _gpu_named(description: str, folder: Path) -> str:
    """Return the catalogue's GPU whose name's words are all in ``description``; the longest such name wins."""
    words = set(description.lower().replace("-", " ").split())
    found = [name for name in catalog.names("gpus") if set(name.split("-")) <= words]
    if not found:
        raise InputError(str(folder), f"no GPU of the catalogue is called like '{description}'")
    return max(found, key=lambda name: (len(name), name))


def _llm_named(model: str, folder: Path) -> str:
    base = model.split("/")[-1].lower()
    known: Sequence[str] = catalog.names("llms")
    if base not in known:
        raise InputError(str(folder), f"the catalogue has no language model '{base}' (of {model})")
    return base
