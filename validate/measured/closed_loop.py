"""Simulates measured servers under closed-loop load: scenario by scenario through the simulator, several processes at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from serving.scenario import Scenario
from sim.fleet import Parts
from validate.measured.datasheet import least_ratio
from validate.measured.host_time import WithHostTime
from validate.measured.row import Progress
from validate.measured.served import ENGINES, SEED, WAVES, Priced, Served, Setup, price


class Means(NamedTuple):
    """Simulated means over all requests of a run, seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task found: the means of each run, and the latency model's name."""

    means: dict[tuple[Served, Setup], Means]
    words: str


Task = Sequence[tuple[Served, Setup]]  # runs of one deployment


def simulate_all(runs: Sequence[tuple[Served, Setup]], *, jobs: int, progress: Progress | None = None) -> dict[tuple[str, ...], Answer]:
    """Simulate every run and return the answers by deployment. ``jobs`` processes share the work; the result does not depend on them."""
    tasks: dict[tuple[str, ...], list[tuple[Served, Setup]]] = {}
    for row, setup in runs:
        tasks.setdefault(row.deployment, []).append((row, setup))
    answers, done = {}, 0
    for deployment, answer in zip(tasks, _answers(list(tasks.values()), jobs)):
        answers[deployment] = answer
        done += len(tasks[deployment])
        if progress is not None:
            progress(done, len(runs))
    return answers


def _answers(tasks: Sequence[Task], jobs: int) -> Iterator[Answer]:
    if jobs == 1:
        yield from map(carry_out, tasks)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(carry_out, tasks)


def carry_out(task: Task) -> Answer:
    """Simulate the runs of one deployment, whose latency model is built once. Raises ArithmeticError if that beats the datasheet."""
    row = task[0][0]
    priced = price(row)
    ratio = least_ratio(priced.model, priced.llm, priced.gpu, row.tensor_parallel, row.weight_dtype)
    if ratio < 1.0:
        raise ArithmeticError(f"{row.where}: {priced.words} prices a step at {ratio:.3f} of what the datasheet allows")
    return Answer({(row, setup): simulate_row(row, setup, priced) for row, setup in task}, priced.words)


def simulate_row(row: Served, setup: Setup, priced: Priced) -> Means:
    """Simulate one measured server and return the means that its client reports."""
    from serving.clients import start_clients
    from serving.scenario import from_mapping
    from sim.fleet import build_fleet, new_metrics

    scenario = from_mapping(scenario_of(row, setup))
    parts = _parts(scenario, row, setup, priced)
    metrics = new_metrics(scenario, keep_rows=True)
    cluster = build_fleet(scenario, {"replicas": parts}, metrics)
    start_clients(
        cluster, scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, max_model_len=parts.max_model_len,
        prefix_caching=False, saturation_rps=None, slo=scenario.slo, skipped={},
    )  # fmt: skip
    cluster.env.run()
    cluster.drain()
    columns = metrics.columns()
    first_s, tokens = columns["first_token_s"], columns["output_tokens"]
    several = tokens > 1
    tpot_s = ((columns["finish_s"] - first_s) / np.maximum(tokens - 1, 1))[several]
    return Means(float((first_s - columns["arrival_s"]).mean()), float(tpot_s.mean()) if several.any() else 0.0)


def scenario_of(row: Served, setup: Setup) -> dict[str, Any]:
    """The row as a scenario; random prompts share no prefix."""
    engine = ENGINES[row.engine]
    return {
        "version": 1,
        "name": "served",
        "seed": SEED,
        "llm": row.llm,
        "cluster": {"gpu": row.gpu, "replicas": 1, "tensor_parallel": row.tensor_parallel, "weight_dtype": row.weight_dtype},
        "kv_cache": {"block_tokens": engine.block_tokens, "prefix_caching": False},
        "policy": {
            "ordering": "fcfs",
            "batching": {"name": engine.batching, "max_batch_tokens": setup.max_batch_tokens or engine.max_batch_tokens, "max_batch_seqs": engine.max_batch_seqs},
            "preemption": "latest",
        },
        "workload": {
            "requests": WAVES * row.users,
            "arrivals": {"process": "closed_loop", "users": row.users, "think_s": _jitter(setup.jitter_s)},
            "prompt_tokens": _lengths(row.prompt_tokens, setup.spread),
            "output_tokens": _lengths(row.output_tokens, setup.spread),
        },
    }


def _lengths(nominal: int, spread: float) -> dict[str, Any]:
    return {"dist": "uniform", "min": max(1, round((1.0 - spread) * nominal)), "max": nominal} if spread else {"dist": "constant", "value": nominal}


def _jitter(mean_s: float) -> dict[str, Any]:
    return {"dist": "exponential", "mean": mean_s} if mean_s else {"dist": "constant", "value": 0.0}


def _parts(scenario: Scenario, row: Served, setup: Setup, priced: Priced) -> Parts:
    """As ``sim.fleet.resolve``, with a latency model that exists already."""
    from sim.fleet import resolve

    host_s = setup.host_step_s
    if host_s is None:
        host_s = 0.0 if ENGINES[row.engine].hidden_host else priced.gpu.host.step_s
    model = WithHostTime(priced.model, host_s)
    return replace(resolve(scenario), latency=model, latencies=(model,))
