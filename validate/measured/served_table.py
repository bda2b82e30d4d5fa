"""Errors of the simulator on a table of measured servers: with nothing fitted, and fitted on a random half and judged on the other.

What is fitted, for each group of rows (one engine, LLM, dtype and GPU), is what the table does not record, one quantity after the
other, starting from what is documented: the server's slots, its tokens a step, the host's time per step and per sequence in it, the
spread of the client's lengths, the host's times again. The judged half is not looked at until all are fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from serving.catalog import load_gpu
from serving.rng import stream
from validate.measured import served
from validate.measured.closed_loop import Answer, Run, Simulate, simulations
from validate.measured.row import NOTHING, Progress, Row, row
from validate.measured.served import Served, Setup

SLOTS_SHORT = (1,)  # TensorRT-LLM only: the request that pads its CUDA graphs may hold a slot
BUDGETS = (8192, 16384)  # tokens a step; not where the launch script is public
SPREADS = (0.01, 0.1)
HOST_MORE_S = (0.002, 20e-6)  # a step, a sequence: simulated; a row's means are taken as linear in them
HOST_STEP_GRID_S = tuple(step * 1e-4 for step in range(51))
HOST_SEQUENCE_GRID_S = tuple(step * 1e-6 for step in range(61))

Answers = Mapping[Run, Answer]


def rows(path: Path, *, fit: bool, jobs: int, progress: Progress | None = None, sample: int | None = None) -> list[Row]:
    """Return the errors of TTFT and TPOT of every measured server in ``path``; ``sample`` takes so many rows of each group."""
    table = _sampled(served.read(path), sample)
    runs = [(server, Setup()) for server in table]
    with simulations(jobs, progress) as simulate:
        answers = simulate(runs)
        result = [each for run in runs for each in _errors(path, run, answers, NOTHING)]
        if fit:
            halves = _halves(table)
            setups = fit_groups({group: fitted for group, (fitted, _) in halves.items()}, simulate, answers)
            runs = [(server, setups[group]) for group, (_, judged) in halves.items() for server in judged]
            answers = simulate(runs)
            for run in runs:
                result += _errors(path, run, answers, f"{run[1].words()}: on a random half of the group, judged on the rest")
    return result


def fit_groups(groups: Mapping[str, Sequence[Served]], simulate: Simulate, known: Answers | None = None) -> dict[str, Setup]:
    """Return the setup of each group that brings its rows' median errors of TTFT and TPOT down most, host time included.

    ``known`` are answers that need not be simulated again.
    """
    answers = dict(known or {})

    def complete(wanted: Mapping[str, Sequence[Setup]]) -> None:
        answers.update(simulate(run for group, setups in wanted.items() for run in product(groups[group], setups) if run not in answers))

    def closest(setups: Mapping[str, Setup], others: Callable[[Served, Setup], list[Setup]]) -> dict[str, Setup]:
        tried = {group: [setups[group], *others(members[0], setups[group])] for group, members in groups.items()}
        complete(tried)
        return {group: min(tried[group], key=lambda setup: _loss(_ratios(members, setup, answers))) for group, members in groups.items()}

    setups = closest(closest(dict.fromkeys(groups, Setup()), _other_slots), _other_budgets)
    own_s = {group: members[0].launch.host_step_s(load_gpu(members[0].gpu)) for group, members in groups.items()}
    ends = {group: _host_ends(setup, own_s[group]) for group, setup in setups.items()}
    complete(ends)
    slopes = {group: _slopes([_ratios(members, end, answers) for end in ends[group]]) for group, members in groups.items()}
    setups = {group: replace(setup, host_step_s=own_s[group]) for group, setup in setups.items()}
    setups = {group: _with_host(setups[group], _ratios(members, ends[group][0], answers), slopes[group]) for group, members in groups.items()}
    setups = closest(setups, _other_spreads)
    return {group: _with_host(setups[group], _ratios(members, setups[group], answers), slopes[group]) for group, members in groups.items()}


def _other_slots(server: Served, setup: Setup) -> list[Setup]:
    return [replace(setup, slots_short=short) for short in SLOTS_SHORT] if server.engine == "trtllm" else []


def _other_budgets(server: Served, setup: Setup) -> list[Setup]:
    return [] if server.inferencex else [replace(setup, max_batch_tokens=tokens) for tokens in BUDGETS]


def _other_spreads(server: Served, setup: Setup) -> list[Setup]:
    return [replace(setup, spread=spread) for spread in SPREADS]


def _host_ends(setup: Setup, own_s: float) -> list[Setup]:
    """With the engine's own host time, with more a step, and with some a sequence."""
    step_s, sequence_s = HOST_MORE_S
    return [setup, replace(setup, host_step_s=own_s + step_s), replace(setup, host_sequence_s=sequence_s)]


def _slopes(ratios: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What a second of host time a step, and one a sequence, add to the ratios at ``_host_ends``."""
    own, step, sequence = ratios
    return (step - own) / HOST_MORE_S[0], (sequence - own) / HOST_MORE_S[1]


def _with_host(setup: Setup, ratios: np.ndarray, slopes: tuple[np.ndarray, np.ndarray]) -> Setup:
    """``setup``, whose ratios these are, with the host times that fit best."""
    present = (setup.host_step_s or 0.0, setup.host_sequence_s)

    def loss(host: tuple[float, float]) -> float:
        return _loss(ratios + (host[0] - present[0]) * slopes[0] + (host[1] - present[1]) * slopes[1])

    step_s, sequence_s = min(product(HOST_STEP_GRID_S, HOST_SEQUENCE_GRID_S), key=loss)
    return replace(setup, host_step_s=step_s, host_sequence_s=sequence_s)


def _ratios(members: Sequence[Served], setup: Setup, answers: Answers) -> np.ndarray:
    """Simulated over real, [rows, (TTFT, TPOT)]."""
    return np.array([answers[server, setup].means for server in members]) / [(server.ttft_s, server.tpot_s) for server in members]


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


def _evenly(members: Sequence[Served], count: int) -> list[Served]:
    """At most ``count`` members, spread over the table's order, which goes by lengths."""
    taken = min(count, len(members))
    return [members[i * len(members) // taken] for i in range(taken)]


def _sampled(table: list[Served], sample: int | None) -> list[Served]:
    if sample is None:
        return table
    groups: dict[str, list[Served]] = {}
    for server in table:
        groups.setdefault(server.group, []).append(server)
    return [server for members in groups.values() for server in _evenly(members, sample)]


def _errors(path: Path, run: Run, answers: Answers, fitted_on: str) -> list[Row]:
    server, (means, words) = run[0], answers[run]
    dataset = f"{path.stem}/{server.group}/{server.identity}"
    engine = f"{server.engine} {server.version}".strip()
    return [
        row(dataset, engine, words, "ttft_s", "mean", server.ttft_s, means.ttft_s, fitted_on),
        row(dataset, engine, words, "tpot_s", "mean", server.tpot_s, means.tpot_s, fitted_on),
    ]
