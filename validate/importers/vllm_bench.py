"""``vllm bench serve`` results (``--save-result``, with or without ``--save-detailed``), and those of its forerunner benchmark_serving.py."""

from __future__ import annotations

import re
from typing import Any

from serving.errors import InputError
from validate.importers.imported import NAN, Imported, Served, failure
from validate.importers.source import Source, number

NAME = "vllm-bench"
_METRICS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
_STATED = re.compile(r"(mean|median|p\d+)_(ttft|tpot|itl|e2el)_ms")
_DETAIL = ("input_lens", "output_lens", "ttfts", "itls")


def matches(source: Source) -> bool:
    """Whether the file is one JSON object with the benchmark's keys."""
    document = source.document
    return document is not None and "mean_ttft_ms" in document and "request_throughput" in document


def read(source: Source, select: int | None = None) -> Imported:
    """Read a result. Raises InputError naming what is missing or inconsistent."""
    document, where = source.document or {}, str(source.path)
    run = Imported(NAME, source.path)
    run.facts = {key: document[key] for key in ("model_id", "backend", "endpoint_type", "request_rate", "burstiness", "max_concurrency", "date") if key in document}
    run.duration_s = number(document, "duration", where)
    for key, value in document.items():
        found = _STATED.fullmatch(key)
        if found and value is not None:
            statistic = {"median": "p50"}.get(found[1], found[1])
            run.stated.setdefault(_METRICS[found[2]], {})[statistic] = number(document, key, where) / 1e3
    completed = int(number(document, "completed", where))
    prompts = int(document.get("num_prompts") or completed)
    run.counts = {"arrived": prompts, "completed": completed, "failed": prompts - completed}
    run.rates = {"requests_per_s": number(document, "request_throughput", where), "output_tokens_per_s": number(document, "output_throughput", where)}
    if run.duration_s > 0 and "total_input_tokens" in document:
        run.rates["prompt_tokens_per_s"] = number(document, "total_input_tokens", where) / run.duration_s
    if all(document.get(key) for key in _DETAIL):
        _add_requests(run, document, where, prompts)
    else:
        run.notes.append("the file states statistics only; there is no table of requests")
    return run


def _add_requests(run: Imported, document: dict[str, Any], where: str, prompts: int) -> None:
    columns = {key: document[key] for key in _DETAIL}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        raise InputError(where, f"{', '.join(_DETAIL)} have {sorted(lengths)} entries", "they must be equally long")
    count = lengths.pop()
    starts = document.get("start_times") or [0.0] * count
    errors = document.get("errors") or [""] * count
    if not document.get("start_times"):
        run.notes.append("no start times were saved: each request's times count from its own start, and arrivals cannot be replayed")
    for i in range(count):
        ttft_s, gaps_s, output = float(columns["ttfts"][i]), [float(gap) for gap in columns["itls"][i]], int(columns["output_lens"][i])
        start_s, prompt = float(starts[i]), int(columns["input_lens"][i])
        if errors[i] or not output:
            run.served.append(Served(start_s, prompt, 0, NAN, NAN, status=failure(cancelled=False)))
            continue
        run.served.append(Served(start_s, prompt, output, start_s + ttft_s, start_s + ttft_s + sum(gaps_s)))
        run.gaps_s.extend(gaps_s)
    if document.get("start_times"):
        from validate.importers.imported import rebase

        rebase(run.served, min(request.arrival_s for request in run.served))
    if count < prompts:
        run.partial = True
        run.notes.append(f"{count} of {prompts} requests are in the file: the summary is what it states of all of them")
