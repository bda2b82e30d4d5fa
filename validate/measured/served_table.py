"""Errors of the simulator on a table of measured servers: with nothing fitted, and fitted on a random half and judged on the other.

What is fitted, for each group of rows (one engine, LLM, dtype and GPU), is what the table does not record: first the setup of client
and server (``SETUPS``) that comes closest, then the host's time per step. The judged half is not looked at until both are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from serving.rng import stream
from validate.measured import served
from validate.measured.closed_loop import Answer, simulate_all
from validate.measured.row import NOTHING, Progress, Row, row
from validate.measured.served import Served, Setup

BUDGETS = (4096, 8192, 16384)
CLIENTS = ((0.0, 0.0), (0.0, 0.003), (0.005, 0.0), (0.01, 0.0), (0.02, 0.0), (0.1, 0.0), (0.2, 0.0))  # spread of lengths, jitter
SETUPS = tuple(Setup(spread, jitter_s, budget) for budget in BUDGETS for spread, jitter_s in CLIENTS)
SETUP_ROWS = 24  # of a group's half, to choose the setup on
HOST_STEPS_S = (0.0, 0.002)  # simulated; between and beyond them a row's means are taken as linear
HOST_GRID_S = tuple(step * 1e-4 for step in range(51))
CIRCULAR = "nothing here, but the catalogue's 1 ms of host time a step was chosen on this group by its source"
CIRCULAR_GROUP = "llama-3.1-70b fp8 h100-sxm vllm"

Answers = Mapping[tuple[str, ...], Answer]
Runs = list[tuple[Served, Setup]]


def rows(path: Path, *, fit: bool, jobs: int, progress: Progress | None = None, sample: int | None = None) -> list[Row]:
    """Return the errors of TTFT and TPOT of every measured server in ``path``; ``sample`` takes so many rows of each group."""
    table = _sampled(served.read(path), sample)
    runs: Runs = [(server, server.documented) for server in table]
    answers = simulate_all(runs, jobs=jobs, progress=progress)
    result = [each for server, setup in runs for each in _errors(path, server, setup, answers, CIRCULAR if server.group == CIRCULAR_GROUP else NOTHING)]
    if fit:
        halves = _halves(table)
        setups = fit_groups({group: fitted for group, (fitted, _) in halves.items()}, jobs=jobs, progress=progress)
        runs = [(server, setups[group]) for group, (_, judged) in halves.items() for server in judged]
        answers = simulate_all(runs, jobs=jobs, progress=progress)
        for server, setup in runs:
            result += _errors(path, server, setup, answers, f"{setup.words()}: on a random half of the group, judged on the rest")
    return result


def fit_groups(groups: Mapping[str, Sequence[Served]], *, jobs: int, progress: Progress | None = None) -> dict[str, Setup]:
    """Return the setup of each group that brings its rows' median errors of TTFT and TPOT down most, host time included."""
    few = {group: _evenly(members, SETUP_ROWS) for group, members in groups.items()}
    answers = simulate_all([(server, setup) for members in few.values() for server in members for setup in SETUPS], jobs=jobs, progress=progress)
    setups = {group: min(SETUPS, key=lambda setup: _loss(_ratios(members, setup, answers))) for group, members in few.items()}
    ends = {group: [with_host(setup, host_s) for host_s in HOST_STEPS_S] for group, setup in setups.items()}
    answers = simulate_all([(server, end) for group, members in groups.items() for server in members for end in ends[group]], jobs=jobs, progress=progress)
    return {group: with_host(setups[group], _host_s(members, ends[group], answers)) for group, members in groups.items()}


def _evenly(members: Sequence[Served], count: int) -> list[Served]:
    """At most ``count`` members, spread over the table's order, which goes by lengths."""
    taken = min(count, len(members))
    return [members[i * len(members) // taken] for i in range(taken)]


def with_host(setup: Setup, host_s: float) -> Setup:
    """``setup`` with another host time per step."""
    return Setup(setup.spread, setup.jitter_s, setup.max_batch_tokens, host_s)


def _host_s(members: Sequence[Served], ends: Sequence[Setup], answers: Answers) -> float:
    low, high = (_ratios(members, end, answers) for end in ends)
    return min(HOST_GRID_S, key=lambda host_s: _loss(low + host_s / HOST_STEPS_S[1] * (high - low)))


def _ratios(members: Sequence[Served], setup: Setup, answers: Answers) -> np.ndarray:
    """Simulated over real, [rows, (TTFT, TPOT)]."""
    return np.array([answers[server.deployment].means[server, setup] for server in members]) / [(server.ttft_s, server.tpot_s) for server in members]


def _loss(ratios: np.ndarray) -> float:
    return float(np.median(np.abs(ratios - 1.0), axis=0).sum())


def _halves(table: Sequence[Served]) -> dict[str, tuple[list[Served], list[Served]]]:
    """By group: a random half to fit on, and the rest."""
    groups: dict[str, list[Served]] = {}
    for server in table:
        groups.setdefault(server.group, []).append(server)
    halves = {}
    for group, members in groups.items():
        order = stream(served.SEED, f"accuracy.halves.{group}").permutation(len(members))
        fitted = set(order[: len(members) // 2].tolist())
        halves[group] = ([x for i, x in enumerate(members) if i in fitted], [x for i, x in enumerate(members) if i not in fitted])
    return halves


def _sampled(table: list[Served], sample: int | None) -> list[Served]:
    if sample is None:
        return table
    groups: dict[str, list[Served]] = {}
    for server in table:
        groups.setdefault(server.group, []).append(server)
    return [server for members in groups.values() for server in _evenly(members, sample)]


def _errors(path: Path, server: Served, setup: Setup, answers: Answers, fitted_on: str) -> list[Row]:
    answer = answers[server.deployment]
    dataset = f"{path.stem}/{server.group}/{server.identity}"
    engine = f"{server.engine} {server.version}".strip()
    means = answer.means[server, setup]
    return [
        row(dataset, engine, answer.words, "ttft_s", "mean", server.ttft_s, means.ttft_s, fitted_on),
        row(dataset, engine, answer.words, "tpot_s", "mean", server.tpot_s, means.tpot_s, fitted_on),
    ]
