"""requests.jsonl of a real vLLM run as its engine core stamped it, with meta.json and timeseries.csv beside it.

Arrivals are unix seconds of the client, all other times monotonic seconds of the engine. The clocks are joined at request 0:
it is taken to have been queued when it arrived. An engine takes requests in between two steps, so the others are queued up to
a step after they arrive; the statistics that the engine itself counts from there are kept in ``stated`` as ``ttft_from_queued_s``.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from serving.files import read_json_object
from validate.importers.imported import STATISTICS, Imported, Served
from validate.importers.source import Source, number

NAME = "vllm-requests"
_KEYS = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
_ENGINE = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "data_parallel_size", "dtype", "kv_cache_dtype", "max_model_len")


def matches(source: Source) -> bool:
    """Whether the first line has the engine's time stamps."""
    return source.first_line is not None and {"queued_ts", "first_token_ts", "last_token_ts"} <= source.first_line.keys()


def read(source: Source, select: int | None = None) -> Imported:
    """Read the requests and what lies beside them. Raises InputError naming the line and key that is wrong."""
    run = Imported(NAME, source.path)
    lines = [(f"{source.path}:{line}", record) for line, record in source.lines()]
    stamps = [{key: number(record, key, where) for key in _KEYS} for where, record in lines]
    first = stamps[0]
    queued_s = []
    for (where, record), stamp in zip(lines, stamps):
        engine_s = {key: stamp[key] - first["queued_ts"] for key in _KEYS[1:]}
        arrival_s = min(stamp["arrival_time"] - first["arrival_time"], engine_s["queued_ts"])  # the join is good to a few milliseconds
        run.served.append(
            Served(arrival_s, int(number(record, "input_toks", where)), int(number(record, "output_toks", where)), engine_s["first_token_ts"],
                   engine_s["last_token_ts"], scheduled_s=engine_s["scheduled_ts"])
        )  # fmt: skip
        queued_s.append(engine_s["queued_ts"])
    ttft_s = np.array([request.first_token_s for request in run.served]) - queued_s
    values = [ttft_s.mean(), *np.percentile(ttft_s, [50, 90, 95, 99]), ttft_s.max()]
    run.stated["ttft_from_queued_s"] = {name: float(value) for name, value in zip(STATISTICS, values)}
    run.notes.append("ITL is not known: the engine stamped the first and the last token of each request only")
    meta = _meta(source.path.parent / "meta.json")
    run.facts, run.device = _facts(meta)
    run.seed = int((meta.get("engine_kwargs") or {}).get("seed") or 0)
    run.kv_use = _kv_use(source.path.parent / "timeseries.csv")
    return run


def _meta(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    return read_json_object(path)


def _facts(meta: dict[str, Any]) -> tuple[dict[str, Any], str]:
    engine, cache = meta.get("engine_kwargs") or {}, meta.get("kv_cache") or {}
    facts = {"model_id": meta.get("model"), "engine": f"vllm {meta['vllm_version']}" if "vllm_version" in meta else None}
    facts |= {key: engine.get(key) for key in _ENGINE}
    facts |= {key: cache.get(key) for key in ("num_gpu_blocks", "block_size", "enable_prefix_caching")}
    device = (meta.get("hardware") or {}).get("device_name") or "unknown"
    return {key: value for key, value in facts.items() if value is not None}, device


def _kv_use(path: Path) -> dict[str, float] | None:
    """Share of the KV cache in use, from one sample a second; None when it was not sampled."""
    if not path.exists():
        return None
    with path.open(newline="") as stream:
        shares = [float(row["kv_cache_pct"]) / 100 for row in csv.DictReader(stream) if row.get("kv_cache_pct")]
    if not shares or max(shares) == 0.0:
        return None
    return {"mean": sum(shares) / len(shares), "max": max(shares)}
