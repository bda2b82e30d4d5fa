"""AIPerf exports: profile_export_aiperf.json (statistics) and profile_export.jsonl (one record per request).

AIPerf's ``inter_token_latency`` is our TPOT, (latency - TTFT) / (output - 1); its ``inter_chunk_latency`` is our ITL.
"""

from __future__ import annotations

from typing import Any

from serving.errors import InputError
from serving.metrics import COMPLETED
from validate.importers.imported import NAN, Imported, Served, failure, rebase
from validate.importers.source import Source, number

NAME = "aiperf"
_METRICS = {"time_to_first_token": "ttft_s", "inter_token_latency": "tpot_s", "inter_chunk_latency": "itl_s", "request_latency": "e2e_s"}
_STATISTICS = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "max": "max"}
_RATES = {"request_throughput": "requests_per_s", "output_token_throughput": "output_tokens_per_s"}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def matches(source: Source) -> bool:
    """Whether the file is a summary with units, or lines of metadata and metrics."""
    line = source.first_line
    if line is not None and {"metadata", "metrics"} <= line.keys():
        return True
    document = source.document
    return document is not None and all(isinstance(document.get(key), dict) and "unit" in document[key] for key in ("request_latency", "request_count"))


def read(source: Source, select: int | None = None) -> Imported:
    """Read a summary or a list of records. Raises InputError naming the line and key that is wrong."""
    return _summary(source) if source.document is not None and "metadata" not in source.document else _records(source)


def _summary(source: Source) -> Imported:
    document, where = source.document or {}, str(source.path)
    run = Imported(NAME, source.path)
    for key, metric in _METRICS.items():
        block = document.get(key)
        if isinstance(block, dict):
            scale = _scale(block, f"{where}: {key}")
            run.stated[metric] = {ours: number(block, theirs, f"{where}: {key}") * scale for theirs, ours in _STATISTICS.items() if block.get(theirs) is not None}
    run.rates = {ours: number(document[key], "avg", f"{where}: {key}") for key, ours in _RATES.items() if isinstance(document.get(key), dict)}
    completed = int(number(document["request_count"], "avg", f"{where}: request_count"))
    failed = int((document.get("error_request_count") or {}).get("avg") or 0)
    run.counts = {"arrived": completed + failed, "completed": completed, "failed": failed}
    duration = document.get("benchmark_duration")
    if isinstance(duration, dict):
        run.duration_s = number(duration, "avg", f"{where}: benchmark_duration") * _scale(duration, where)
        if isinstance(document.get("total_isl"), dict) and run.duration_s:
            run.rates["prompt_tokens_per_s"] = number(document["total_isl"], "avg", f"{where}: total_isl") / run.duration_s
    run.facts, run.seed = _facts(document.get("input_config") or {})
    run.device = ", ".join(_gpu_names(document.get("telemetry_data") or {})) or "unknown"
    run.notes.append("the file states statistics only; there is no table of requests (profile_export.jsonl has them)")
    return run


def _records(source: Source) -> Imported:
    run = Imported(NAME, source.path)
    for line, record in source.lines():
        where = f"{source.path}:{line}"
        metadata, metrics = record.get("metadata"), record.get("metrics")
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            raise InputError(where, "lacks 'metadata' or 'metrics'")
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            continue  # warm-up
        arrival_s = number(metadata, "request_start_ns", where) * 1e-9
        cancelled = bool(metadata.get("was_cancelled"))
        if record.get("error") or cancelled:
            prompt = int((metrics.get("input_sequence_length") or {}).get("value") or 0)
            run.served.append(Served(arrival_s, prompt, 0, NAN, NAN, status=failure(cancelled)))
            continue
        ttft_s, latency_s = (_value(metrics, key, where) for key in ("time_to_first_token", "request_latency"))
        prompt, output = (int(_value(metrics, key, where)) for key in ("input_sequence_length", "output_sequence_length"))
        run.served.append(Served(arrival_s, prompt, output, arrival_s + ttft_s, arrival_s + latency_s))
        chunks = metrics.get("inter_chunk_latency") or {}
        run.gaps_s.extend(gap * _scale(chunks, where) for gap in chunks.get("value") or [])
    if not run.served:
        raise InputError(str(source.path), "holds no record of a profiling request")
    rebase(run.served, min(request.arrival_s for request in run.served))
    run.served.sort(key=lambda request: request.arrival_s)
    if not any(request.status == COMPLETED for request in run.served):
        run.notes.append("no request completed")
    return run


def _value(metrics: dict[str, Any], key: str, where: str) -> float:
    block = metrics.get(key)
    if not isinstance(block, dict):
        raise InputError(where, f"lacks the metric '{key}'", "was the run made with --streaming?")
    return number(block, "value", f"{where}: {key}") * (_scale(block, where) if block.get("unit") in _SECONDS else 1.0)


def _scale(block: dict[str, Any], where: str) -> float:
    unit = block.get("unit")
    if unit not in _SECONDS:
        raise InputError(where, f"unit '{unit}' is no unit of time", "expected one of " + ", ".join(_SECONDS))
    return _SECONDS[unit]


def _facts(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    endpoint, load, data = (config.get(key) or {} for key in ("endpoint", "loadgen", "input"))
    facts = {"model_id": (endpoint.get("model_names") or [None])[0], "endpoint_type": endpoint.get("type"), **load}
    return {key: value for key, value in facts.items() if value is not None}, int(data.get("random_seed") or 0)


def _gpu_names(telemetry: dict[str, Any]) -> list[str]:
    gpus = [gpu for endpoint in (telemetry.get("endpoints") or {}).values() for gpu in (endpoint.get("gpus") or {}).values()]
    return sorted({gpu["gpu_name"] for gpu in gpus if "gpu_name" in gpu})
