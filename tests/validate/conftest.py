"""Run directories made by a small, independent model of chunked prefill: what reports and explanations are tested on."""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests
FIXED_S, PREFILL_S, DECODE_S, CONTEXT_S, EAGER_S = 5e-3, 2e-5, 5e-5, 2e-8, 8e-3
SPIKES = ("host_stall", "clock", "graph_miss", "prefill_interference", "cold_start")


def _replica(replica: int, arrivals: list[tuple], spike: str | None, slots: int, blocks: int, speed: float) -> tuple[list, list]:
    """Serve ``arrivals`` (id, time, prompt, output) on one replica, step by step; return its request and step rows."""
    now = 3.0 if spike == "cold_start" else 0.0
    waiting, rows, steps = list(reversed(arrivals)), {}, []
    prefilling, decoding, context, clock, step = [], [], 0, 0, 0
    times: dict[int, list] = {}
    while waiting or prefilling or decoding:
        if not prefilling and not decoding and waiting[-1][1] > now:
            now = waiting[-1][1]
        if spike == "host_stall" and step == 300:
            now += 2.0
        budget, chunks = 2048 - len(decoding), 0
        while waiting and waiting[-1][1] <= now and len(decoding) + len(prefilling) < slots:
            request = waiting.pop()
            prefilling.append([request, request[2]])
            times[request[0]] = [now, np.nan]
        start_budget, done = budget, []
        for entry in prefilling:
            if budget <= 0:
                break
            taken = min(budget, entry[1])
            entry[1] -= taken
            budget -= taken
            chunks += 1
            if entry[1] == 0:
                done.append(entry)
        prefill = start_budget - budget
        eager = spike == "graph_miss" and 300 <= step < 420
        duration = FIXED_S + PREFILL_S * prefill + DECODE_S * len(decoding) + CONTEXT_S * context + (EAGER_S if eager else 0)
        duration /= speed
        if spike == "clock" and 300 <= step < 420:
            duration *= 3
        used = min(blocks, (context + sum(e[0][2] - e[1] for e in prefilling)) // 16 + 1)
        steps.append((step, replica, now, duration, prefill, chunks, len(decoding), context, used, 0 if eager or prefill else 64, 0, 1))
        now, step = now + duration, step + 1
        clock += 1
        context += len(decoding)
        while decoding and decoding[0][0] <= clock:
            _, request = heapq.heappop(decoding)
            context -= request[2] + request[3]
            rows[request[0]] = (*times.pop(request[0]), now)
        for entry in done:
            prefilling.remove(entry)
            request = entry[0]
            times[request[0]][1] = now
            if request[3] == 1:
                rows[request[0]] = (*times.pop(request[0]), now)
                continue
            heapq.heappush(decoding, (clock + request[3] - 1, request))
            context += request[2] + 1
    return [(request, rows[request[0]], replica) for request in arrivals], steps


def _summary(name: str, columns: dict, duration_s: float, slo: tuple[float, float], busy_s: float, replicas: int, kv: np.ndarray) -> dict:
    arrival, first, finish = columns["arrival_s"], columns["first_token_s"], columns["finish_s"]
    gaps = np.maximum(columns["output_tokens"] - 1, 1)
    values = {
        "ttft_s": first - arrival, "tpot_s": (finish - first) / gaps, "itl_s": (finish - first) / gaps,
        "e2e_s": finish - arrival, "queue_s": columns["scheduled_s"] - arrival,
    }  # fmt: skip
    met = (values["ttft_s"] <= slo[0]) & (values["tpot_s"] <= slo[1])
    names = sorted(set(columns["class"]))
    return {
        "schema_version": 1, "scenario": name, "seed": 7,
        "requests": {"arrived": len(arrival), "completed": len(arrival), "rejected": 0, "failed": 0, "preempted": 0},
        "duration_s": duration_s,
        **{key: {"mean": float(v.mean()), **{f"p{q}": float(np.quantile(v, q / 100)) for q in (50, 90, 95, 99)}, "max": float(v.max())}
           for key, v in values.items()},
        "prompt_tokens_per_s": float(columns["prompt_tokens"].sum() / duration_s),
        "output_tokens_per_s": float(columns["output_tokens"].sum() / duration_s),
        "requests_per_s": len(arrival) / duration_s, "goodput_rps": float(met.sum() / duration_s),
        "slo_attainment": {"overall": float(met.mean()), "by_class": {n: float(met[columns["class"] == n].mean()) for n in names}},
        "preemptions": 0, "prefix_cache_hit_rate": 0.0, "kv_utilisation": {"mean": float(kv.mean()), "max": float(kv.max())},
        "gpu_busy_fraction": busy_s / duration_s / replicas, "load_factor": 0.71, "steps": len(kv), "events": len(kv),
        "cost_usd": 0.4, "usd_per_million_output_tokens": 0.9,
    }  # fmt: skip


def write_run(folder: Path, *, requests: int = 300, replicas: int = 2, rate_rps: float = 8.0, seed: int = 7, spike: str | None = None,
              slots: int = 64, blocks: int = 4000, name: str = "chat-8b",
              device: str = "simulated h100-sxm", speed: float = 1.0) -> Path:  # fmt: skip
    """Write a run directory that follows the contract; ``spike`` (one of SPIKES) plants one cause of slow requests."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import yaml

    rng = np.random.Generator(np.random.PCG64(seed))
    arrival = np.cumsum(rng.exponential(1 / rate_rps, requests))
    prompt = np.clip(rng.lognormal(6.2, 0.9, requests), 8, 8192).astype(int)
    output = np.clip(rng.lognormal(5.0, 0.7, requests), 1, 1024).astype(int)
    if spike == "prefill_interference":
        prompt[requests // 2 : requests // 2 + 12] = 60_000
    classes = np.where(rng.random(requests) < 0.2, "p0", "p1")
    served, steps = [], []
    for replica in range(replicas):
        mine = range(replica, requests, replicas)
        rows, stepped = _replica(replica, [(i, float(arrival[i]), int(prompt[i]), int(output[i])) for i in mine], spike, slots, blocks, speed)
        served += rows
        steps += stepped
    served.sort(key=lambda row: row[0][0])
    times = np.array([row[1] for row in served])
    columns = {
        "request_id": np.arange(requests), "class": classes, "arrival_s": arrival, "prompt_tokens": prompt,
        "cached_tokens": np.zeros(requests, int), "output_tokens": output, "scheduled_s": times[:, 0], "first_token_s": times[:, 1],
        "finish_s": times[:, 2], "preemptions": np.zeros(requests, int), "replica": np.array([row[2] for row in served]),
        "status": np.full(requests, "completed"),
    }  # fmt: skip
    keys = ("step", "replica", "start_s", "duration_s", "prefill_tokens", "prefill_seqs", "decode_seqs", "decode_context_tokens",
            "kv_blocks_used", "graph", "preempted", "steps")  # fmt: skip
    table = dict(zip(keys, map(np.array, zip(*steps))))
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "requests.parquet")
    pq.write_table(pa.table(table), folder / "steps.parquet")
    end = float(times[:, 2].max())
    summary = _summary(name, columns, end, (0.5, 0.05), float(table["duration_s"].sum()), replicas, table["kv_blocks_used"] / blocks)
    (folder / "summary.json").write_text(json.dumps(summary))
    scenario = {
        "version": 1, "name": name, "seed": seed, "llm": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm", "replicas": replicas, "tensor_parallel": 1},
        "policy": {"ordering": "fcfs", "batching": {"name": "chunked_prefill", "max_batch_tokens": 2048, "max_batch_seqs": slots}},
        "workload": {"requests": requests, "arrivals": {"process": "poisson", "rate_rps": rate_rps}},
        "slo": {"attainment": 0.99, "default": {"ttft_ms": 500, "tpot_ms": 50}, "classes": {"p0": {"ttft_ms": 200}}},
    }  # fmt: skip
    versions = {"python": "3.11.7", "numpy": "2.1.0"}
    facts = {"twinserve": "0.1.0", "seed": seed, "commit": "0123456789abcdef", "device": device, "partial": False, "versions": versions}
    (folder / "run.yaml").write_text(yaml.safe_dump({**facts, "scenario": scenario}, sort_keys=False))
    return folder


@pytest.fixture(scope="session")
def make_run(tmp_path_factory) -> Callable[..., Path]:
    """Return ``write_run`` bound to fresh folders; equal arguments give one folder, made once."""
    made: dict[tuple, Path] = {}

    def make(**options) -> Path:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = write_run(tmp_path_factory.mktemp("run") / options.get("name", "chat-8b"), **options)
        return made[key]

    return make
