"""Simulates measured servers under closed-loop load: scenario by scenario through the simulator, several processes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from serving.scenario import Scenario
from sim.fleet import Parts
from validate.measured.datasheet import least_ratio
from validate.measured.host_time import WithHostTime
from validate.measured.row import Progress
from validate.measured.served import SEED, WAVES, Deployment, Priced, Served, Setup, price

# A user's next request cannot enter the step that begins when the answer ends. Any time above 0 and below a step's does.
TURNAROUND_S = 1e-4


class Means(NamedTuple):
    """Simulated means over all requests of a run, seconds."""

    ttft_s: float
    tpot_s: float


class Answer(NamedTuple):
    """What became of a run, and the latency model's name."""

    means: Means
    words: str


Run = tuple[Served, Setup]
Simulate = Callable[[Iterable[Run]], dict[Run, Answer]]


@contextmanager
def simulations(jobs: int, progress: Progress | None = None) -> Iterator[Simulate]:
    """Yield a function that simulates runs. ``jobs`` processes share the work and keep what they priced; the answers do not depend on them."""
    if jobs == 1:
        yield partial(_simulate, map, progress)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield partial(_simulate, pool.map, progress)


def _simulate(each: Callable[..., Iterator[list[Answer]]], progress: Progress | None, runs: Iterable[Run]) -> dict[Run, Answer]:
    tasks: dict[Deployment, list[Run]] = {}
    for run in runs:
        tasks.setdefault(run[0].deployment, []).append(run)
    answers: dict[Run, Answer] = {}
    total = sum(len(task) for task in tasks.values())
    for task, found in zip(tasks.values(), each(carry_out, tasks.values())):
        answers |= zip(task, found, strict=True)
        if progress is not None:
            progress(len(answers), total)
    return answers


def carry_out(task: Sequence[Run]) -> list[Answer]:
    """Simulate runs of one deployment. Raises ArithmeticError if its latency model beats the datasheet."""
    priced = _checked(task[0][0].deployment)
    return [Answer(simulate_row(row, setup, priced), priced.words) for row, setup in task]


@lru_cache(maxsize=64)
def _checked(deployment: Deployment) -> Priced:
    priced = price(deployment)
    ratio = least_ratio(priced.model, priced.llm, priced.gpu, deployment.tensor_parallel, deployment.weight_dtype, deployment.kv_dtype)
    if ratio < 1.0:
        raise ArithmeticError(f"{priced.words} prices a step of {deployment} at {ratio:.3f} of what the datasheet allows")
    return priced


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
    launch = row.launch
    seqs = row.users - setup.slots_short if setup.slots_short else launch.max_batch_seqs
    batching = {"name": launch.batching, "max_batch_tokens": setup.max_batch_tokens or launch.max_batch_tokens, "max_batch_seqs": seqs}
    spread = launch.spread if setup.spread is None else setup.spread
    return {
        "version": 1,
        "name": "served",
        "seed": SEED,
        "llm": row.llm,
        "cluster": {"gpu": row.gpu, "replicas": 1, "tensor_parallel": row.tensor_parallel, "weight_dtype": row.weight_dtype},
        "kv_cache": {"block_tokens": launch.block_tokens, "prefix_caching": False, "dtype": launch.kv_dtype},
        "policy": {"ordering": "fcfs", "batching": batching | {"max_in_flight": launch.plans_in_flight}, "preemption": "latest"},
        "workload": {
            "requests": WAVES * row.users,
            "arrivals": {"process": "closed_loop", "users": row.users, "think_s": TURNAROUND_S},
            "prompt_tokens": _lengths(row.prompt_tokens, spread),
            "output_tokens": _lengths(row.output_tokens, spread),
        },
    }


def _lengths(nominal: int, spread: float) -> dict[str, Any]:
    return {"dist": "uniform", "min": max(1, round((1.0 - spread) * nominal)), "max": nominal} if spread else {"dist": "constant", "value": nominal}


def _parts(scenario: Scenario, row: Served, setup: Setup, priced: Priced) -> Parts:
    """As ``sim.fleet.resolve``, with a latency model that exists already."""
    from sim.fleet import resolve

    host_s = setup.host_step_s
    if host_s is None:
        host_s = row.launch.host_step_s(priced.gpu)
    model = WithHostTime(priced.model, host_s, setup.host_sequence_s)
    return replace(resolve(scenario), latency=model, latencies=(model,))
