"""One simulation of a scenario whose policies may be broken, and who is to blame when it fails."""

from __future__ import annotations

import contextlib
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import sim
from hwmodels.latency import LatencyModel
from serving.clients import start_clients
from serving.errors import BrokenPolicyError, IllegalAnswerError, InputError
from serving.scenario import Scenario
from serving.scheduler import Scheduler
from sim.attach import attach as attach_dynamics
from sim.cluster import Cluster
from sim.disaggregation import Disaggregated
from sim.fleet import build_fleet, new_metrics, resolve_fleet

_OUR_FOLDERS = ("serving", "sim", "hwmodels")


@dataclass(frozen=True, slots=True)
class Driven:
    """What came of a run: ``columns`` has one row a request, by id, named as in ``serving.metrics.Row``."""

    cluster: Cluster | Disaggregated
    columns: dict[str, np.ndarray]
    class_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that a policy broke: in which step (None: ``when`` says it), and in which words."""

    step: int | None
    rule: str
    detail: str
    when: str = "before the first step"

    def __str__(self) -> str:
        place = self.when if self.step is None else f"step {self.step}"
        return f"{place}: {self.rule}" + (f" ({self.detail})" if self.detail else "")


class BrokenRuleError(Exception):
    """Raised where a rule is seen broken."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class OutOfTimeError(BaseException):
    """The time limit has passed. No Exception, so that a policy that swallows those does not swallow it."""


def drive(
    scenario: Scenario,
    *,
    audit: float = 0.0,
    stepwise: bool = False,
    saturation_rps: Callable[[], float | None] | None = None,
    wrap: Callable[[LatencyModel], LatencyModel] | None = None,
    attach: Callable[[Cluster | Disaggregated], None] | None = None,
) -> Driven:
    """Run ``scenario`` to its end, all rows kept.

    ``saturation_rps`` resolves load factors: both sides of a comparison must be offered the same. ``wrap`` replaces the latency
    model, ``attach`` sees the fleet before it starts. Whatever a policy raises passes through.
    """
    for key, asked in (("sites", scenario.sites), ("stages", scenario.stages), ("integrity", scenario.front)):
        if asked:
            raise InputError(key, "a suite compares policies on one fleet, without sites or stages", "leave it out")
    parts = resolve_fleet(scenario)
    if wrap is not None:
        wrapped = {role: (wrap(part.latency), tuple(wrap(each) for each in part.latencies)) for role, part in parts.items()}
        parts = {role: replace(part, latency=wrapped[role][0], latencies=wrapped[role][1]) for role, part in parts.items()}
    metrics = new_metrics(scenario, keep_rows=True)
    fleet = build_fleet(scenario, parts, metrics, stepwise=stepwise, audit=audit)
    attach_dynamics(fleet, scenario, parts, metrics)
    if attach is not None:
        attach(fleet)
    start_clients(
        fleet, scenario.workload, seed=scenario.seed, block_tokens=scenario.kv_cache.block_tokens, slo=scenario.slo, skipped={},
        max_model_len=min(part.max_model_len for part in parts.values()), prefix_caching=scenario.kv_cache.prefix_caching,
        saturation_rps=saturation_rps,
    )  # fmt: skip
    fleet.env.run()
    fleet.drain()
    return Driven(fleet, metrics.columns(), metrics.class_names)


@contextlib.contextmanager
def time_limit(cpu_s: float) -> Iterator[None]:
    """Raise OutOfTimeError in this (the main) thread after ``cpu_s`` of its process's CPU time, or ten times that by the clock.

    CPU time, so that a busy machine fails nobody. Where the system has no such timers only the caller's own limit remains.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, cpu_s), (signal.ITIMER_REAL, signal.SIGALRM, 10 * cpu_s))
    before = [signal.signal(name, ring) for _, name, _ in timers]
    try:
        for timer, _, seconds in timers:
            signal.setitimer(timer, seconds)
        yield
    finally:
        for (timer, name, _), old in zip(timers, before):
            signal.setitimer(timer, 0)
            signal.signal(name, old)


def fault_of(error: BaseException, limit_s: float) -> Fault:
    """Say which rule was broken by the policy that raised, never returned, or planned what cannot be."""
    if isinstance(error, BrokenRuleError):
        return error.fault
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    step = next((frame.f_locals["self"].steps for frame in reversed(frames) if isinstance(frame.f_locals.get("self"), Scheduler)), None)
    place = _place(error)
    if isinstance(error, OutOfTimeError):
        return Fault(step, f"must decide in finite time: no end within {limit_s:g} s", place)
    if isinstance(error, IllegalAnswerError):
        return Fault(step, "must return a legal decision", str(error))
    if isinstance(error, BrokenPolicyError):
        words = str(error)
        found = re.search(r"\bstep (\d+)", words)
        return Fault(int(found[1]) if found else step, "must keep its promises and leave no work undone", words)
    if isinstance(error, AssertionError):
        return Fault(step, "pages and queues must agree with the sequences", f"{error} {place}".strip())
    return Fault(step, "must return a legal decision", f"{type(error).__name__}: {error}{place and ', ' + place}")


def _place(error: BaseException) -> str:
    """The innermost line outside the scheduler and the simulator: the policy's own, if there is one."""
    root = Path(sim.__file__).resolve().parents[1]
    ours = tuple(str(root / name) for name in _OUR_FOLDERS)
    lines = traceback.extract_tb(error.__traceback__)
    in_policy = [line for line in lines if not line.filename.startswith(ours) or "policies" in Path(line.filename).parts]
    in_policy = [line for line in in_policy if Path(line.filename).parent.name != "regress" and "site-packages" not in line.filename]
    chosen: Any = (in_policy or lines[-1:] or [None])[-1]
    return "" if chosen is None else f"{Path(chosen.filename).name} line {chosen.lineno}, in {chosen.name}"
