"""A log of another engine's steps as a run directory: what ``calibrate``, ``compare`` and ``parity`` read.

``python -m engine.adapters.vllm_run LOG --out DIR [--clock wall|processor] [--arrivals client|seen] [--trace FILE]``

wall        seconds as they passed
processor   a step takes the seconds that the engine's process spent on a processor; pauses stay as they were, and every instant within a step moves
            with it. What other programs on a shared machine take away is then no part of the run, while arrivals, decisions and their order stay
            what they were. Only for an engine that computes in its own process on a CPU

client      a request arrives when the HTTP server has it
seen        a request arrives at the beginning of the first step whose plan could take it: what lies between (parsing, queues between processes) is no
            part of the run, and ``twinserve parity`` can make every decision again

``--trace`` writes the requests as they came, by the same clock, for ``twinserve run --trace``.
"""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_right
from pathlib import Path
from typing import Any, NamedTuple

from engine.adapters.step_log import FILES
from serving.errors import InputError
from serving.metrics import ABORTED, COMPLETED, FleetTotals, Metrics
from serving.records import RunWriter
from serving.scenario import Scenario, from_mapping

CLOCKS = ("wall", "processor")
ARRIVALS = ("client", "seen")
NAN = math.nan


class Log(NamedTuple):
    """A log as it lies on disk."""

    meta: dict[str, Any]
    steps: list[dict[str, Any]]
    requests: list[dict[str, Any]]


def read_log(folder: Path) -> Log:
    """Raises InputError naming the file (and line) that is missing or broken; a last line cut short is left out."""
    texts = []
    for name in FILES:
        try:
            texts.append((folder / name).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(str(folder / name), f"cannot be read: {error.strerror}", "the folder is what the adapter's setting `log` names") from None
    steps, requests = (_lines(folder / name, text) for name, text in zip(FILES[:2], texts))
    if not steps:
        raise InputError(str(folder / FILES[0]), "holds no step", "did the server serve anything?")
    return Log(json.loads(texts[2]), steps, requests)


def _lines(file: Path, text: str) -> list[dict[str, Any]]:
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            if number == len(lines):  # the server was killed while it wrote
                break
            raise InputError(f"{file}:{number}", "is not JSON") from None
    return found


class Warp:
    """Maps instants of the wall onto a clock on which each step takes as long as given and a pause as long as it took; ``zero_s`` becomes 0."""

    def __init__(self, steps: list[dict[str, Any]], durations_s: list[float], zero_s: float = 0.0) -> None:
        self._zero_s = 0.0
        self._edges: list[float] = [0.0]  # on the wall: begin and end of every step
        self._mapped: list[float] = [0.0]
        for step, duration_s in zip(steps, durations_s):
            begin_s = max(step["start_s"], self._edges[-1])
            self._mapped += [self._mapped[-1] + begin_s - self._edges[-1]]
            self._mapped += [self._mapped[-1] + duration_s]
            self._edges += [begin_s, max(begin_s, step["start_s"] + step["duration_s"])]
        self._zero_s = self(zero_s)

    def __call__(self, wall_s: float | None) -> float:
        """The instant by the other clock; NaN for None."""
        if wall_s is None:
            return NAN
        at = min(bisect_right(self._edges, wall_s), len(self._edges)) - 1
        if at == len(self._edges) - 1:
            return self._mapped[at] + wall_s - self._edges[at] - self._zero_s
        share = (wall_s - self._edges[at]) / (self._edges[at + 1] - self._edges[at])
        return self._mapped[at] + share * (self._mapped[at + 1] - self._mapped[at]) - self._zero_s


def durations_s(log: Log, clock: str) -> list[float]:
    """Seconds of each step by ``clock``. Raises InputError for a clock that is not known, or that the log does not know."""
    if clock not in CLOCKS:
        raise InputError("--clock", f"there is no clock '{clock}'", "wall or processor")
    if clock == "wall":
        return [step["duration_s"] for step in log.steps]
    return [min(step["processor_s"], step["duration_s"]) for step in log.steps]


def zero_s(log: Log) -> float:
    """The instant that becomes zero: the first arrival."""
    return min((request["arrival_s"] for request in log.requests), default=0.0)


def with_arrivals_as_seen(log: Log) -> Log:
    """The log with each request arriving at the beginning of the first step that saw it."""
    seen_s = {request_id: step["start_s"] for step in log.steps for request_id in step["submitted"]}
    return log._replace(requests=[{**request, "arrival_s": seen_s.get(request["request_id"], request["arrival_s"])} for request in log.requests])


def write_run(log: Log, out: Path, *, clock: str = "wall") -> None:
    """Write the run directory. Raises InputError as ``durations_s`` does, or when ``out`` cannot be written."""
    scenario = from_mapping(log.meta["scenario"], shown="meta.json")
    seconds = durations_s(log, clock)
    warp = Warp(log.steps, seconds, zero_s(log))
    names = [row.name for row in scenario.workload.classes] or ["default"]
    metrics = Metrics(names, scenario.slo.targets, keep_rows=True)
    with RunWriter(out, steps=True, plans=True, engine_steps=True) as writer:
        last_s: dict[int, float] = {}
        for step, duration_s in zip(log.steps, seconds):
            begin_s, end_s = warp(step["start_s"]), warp(step["start_s"] + step["duration_s"])
            _add_step(writer, step, begin_s, end_s, duration_s)
            gaps = [end_s - last_s[one] for one in step["tokens"] if one in last_s]
            metrics.itl(gaps, [1] * len(gaps), [end_s] * len(gaps))
            last_s.update(dict.fromkeys(step["tokens"], end_s))
        for request in sorted(log.requests, key=lambda row: (row["finish_s"], row["request_id"])):
            metrics.finish(_request_row(request, metrics, warp))
            metrics.flush_if_full()
        summary = metrics.summary(scenario=scenario.name, seed=log.meta["seed"], totals=_totals(log, seconds, warp))
        writer.publish(
            scenario=_as_it_ran(scenario, log.meta), seed=log.meta["seed"], device=_device(log.meta, clock), summary=summary,
            requests=metrics.columns(), class_names=metrics.class_names,
            versions={"vllm": log.meta["vllm_version"], "dtype": log.meta["engine_kwargs"]["dtype"].removeprefix("torch.")},
            measured_on=log.meta.get("measured_on"),
        )  # fmt: skip


def _add_step(writer: RunWriter, step: dict[str, Any], begin_s: float, end_s: float, duration_s: float) -> None:
    stretch = duration_s / step["duration_s"] if step["duration_s"] else 1.0
    writer.steps.append(
        (
            step["step"], 0, begin_s, duration_s, step["prefill_tokens"], step["prefill_seqs"], step["decode_seqs"], step["decode_context_tokens"],
            step["kv_blocks_used"], step["graph"], step["preempted"], 1,
        )
    )  # fmt: skip
    chunks = [{"request_id": one, "new_tokens": new} for one, new, _ in step["chunks"]]
    writer.plans.append(
        (step["step"], begin_s, end_s, step["submitted"], [], chunks, step["preempted_ids"], [], sorted(step["finished"]), 0, [])
    )  # fmt: skip
    writer.engine_steps.append(
        (
            step["step"], "eager", step["prefill_tokens"] + step["decode_seqs"], step["query_key_pairs"], step["prefill_context_tokens"],
            step["logits_rows"], step["schedule_s"] * stretch, 0.0, 0.0, 0.0, step["post_s"] * stretch, step["device_s"] * stretch,
            step["duration_s"], 0.0, step["events_before_commits"],
        )
    )  # fmt: skip


def _request_row(request: dict[str, Any], metrics: Metrics, warp: Warp) -> tuple:
    times = [warp(request[name]) for name in ("arrival_s", "scheduled_s", "first_token_s", "finish_s")]
    return (
        request["request_id"], metrics.class_index(request["class"]), times[0], request["input_toks"], request["cached_toks"], request["output_toks"],
        times[1], times[2], times[3], request["preemptions"], 0, COMPLETED if request["status"] == "completed" else ABORTED,
    )  # fmt: skip


def _totals(log: Log, seconds: list[float], warp: Warp) -> FleetTotals:
    used = [step["kv_blocks_used"] for step in log.steps]
    blocks = log.meta["kv_cache"]["num_gpu_blocks"] - 1
    last = log.steps[-1]
    return FleetTotals(
        duration_s=warp(last["start_s"] + last["duration_s"]), replicas=1, gpus=1, gpu_usd_per_h=None, busy_s=math.fsum(seconds), steps=len(seconds),
        events=len(seconds) + len(log.requests), kv_blocks=blocks, kv_block_seconds=math.fsum(map(float.__mul__, map(float, used), seconds)),
        kv_max_fraction=max(used) / blocks, preemptions=sum(step["preempted"] for step in log.steps),
        prompt_tokens=sum(request["input_toks"] for request in log.requests), cached_tokens=sum(request["cached_toks"] for request in log.requests),
    )  # fmt: skip


def _as_it_ran(scenario: Scenario, meta: dict[str, Any]) -> dict[str, Any]:
    """The scenario with the pool that the engine really had."""
    pool = meta["kv_cache"]
    cache = scenario.kv_cache.model_copy(
        update={"blocks": pool["num_gpu_blocks"], "block_tokens": pool["block_size"], "prefix_caching": pool["enable_prefix_caching"]}
    )
    return scenario.model_copy(update={"kv_cache": cache, "max_model_len": meta["engine_kwargs"]["max_model_len"]}).resolved()


def _device(meta: dict[str, Any], clock: str) -> str:
    return f"{meta['hardware']['device_name']}, {meta['distribution']} {meta['vllm_version']}" + (", processor time" if clock == "processor" else "")


def write_trace(log: Log, file: Path, *, clock: str = "wall") -> None:
    """Write the completed requests as a trace, arrivals by ``clock``."""
    warp = Warp(log.steps, durations_s(log, clock), zero_s(log))
    done = [request for request in log.requests if request["status"] == "completed"]
    rows = [
        {
            "arrival_s": warp(request["arrival_s"]), "prompt_tokens": request["input_toks"], "output_tokens": request["output_toks"],
            "priority": request["priority"],
        }
        for request in sorted(done, key=lambda request: (request["arrival_s"], request["request_id"]))
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Turn a step log of another engine into a run directory.")
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--arrivals", default="client", choices=ARRIVALS)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    log = read_log(arguments.log)
    if arguments.arrivals == "seen":
        log = with_arrivals_as_seen(log)
    write_run(log, arguments.out, clock=arguments.clock)
    if arguments.trace is not None:
        write_trace(log, arguments.trace, clock=arguments.clock)
    print(f"{arguments.out}: {len(log.requests)} requests and {len(log.steps)} steps by the clock of the {arguments.clock}")


if __name__ == "__main__":
    main()
