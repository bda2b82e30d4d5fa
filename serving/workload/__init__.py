"""Workloads: a scenario's ``workload`` part as a stream of requests, drawn lazily and the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from serving.errors import InputError
from serving.request import Arrival
from serving.scenario.model import Slo
from serving.scenario.workload import Trace, Workload
from serving.workload.adapters import adapted_arrivals, adapted_sessions
from serving.workload.context import Context
from serving.workload.images import most_tokens, pictured_arrivals, pictured_sessions
from serving.workload.reasoning import reasoning_sessions
from serving.workload.replay import check, replay, replay_sessions, trace_format, turn_timing
from serving.workload.sessions import Session, Turn, synthetic_sessions
from serving.workload.synthetic import synthetic

__all__ = ["Session", "Turn", "conversations", "follows_answers", "open_arrivals"]

Item = TypeVar("Item")
Saturation = Callable[[], float] | float | None


def follows_answers(workload: Workload, trace: Trace | None = None) -> bool:
    """Say whether arrivals wait for answers (a closed loop, sessions); if not, ``open_arrivals`` gives them all.

    Raises InputError when a trace's format is not recognised.
    """
    trace = trace or workload.trace
    if workload.closed_loop is not None or trace is None:
        return any(part is not None for part in (workload.closed_loop, workload.sessions, workload.reasoning))
    known = trace_format(trace)
    return turn_timing(trace, known) != "open"


def open_arrivals(
    workload: Workload,
    *,
    seed: int,
    block_tokens: int,
    max_model_len: int,
    prefix_caching: bool,
    trace: Trace | None = None,
    saturation_rps: Saturation = None,
    slo: Slo | None = None,
    skipped: dict[str, int] | None = None,
) -> Iterator[Arrival]:
    """Return the requests of a workload in order of arrival, ids from 0; memory does not grow with their number.

    In a closed loop ``arrival_s`` is 0: the users set it. ``trace`` replaces the workload's own. ``saturation_rps``
    (requests per second, or a function that is called only if needed) resolves load factors. ``slo`` gives requests
    their objective for the first token. ``skipped`` counts, by reason, the trace rows that were left out.

    Raises InputError, before the first request: all rows of a trace are checked. Sessions are refused: their later turns
    have no arrival time yet.
    """
    workload = _with(workload, trace)
    context = _context(workload, Context(seed, block_tokens, max_model_len, prefix_caching, saturation_rps, slo))
    if workload.closed_loop is None and follows_answers(workload):
        raise InputError("workload", "turns of a session wait for answers: they have no arrival times of their own")
    if workload.trace is None:
        return _begun(_adapted(synthetic(workload, context), workload, context))
    _check(workload.trace, context, skipped)
    return _begun(_adapted(replay(workload, context), workload, context))


def conversations(
    workload: Workload,
    *,
    seed: int,
    block_tokens: int,
    max_model_len: int,
    prefix_caching: bool,
    trace: Trace | None = None,
    saturation_rps: Saturation = None,
    slo: Slo | None = None,
    skipped: dict[str, int] | None = None,
) -> Iterator[Session]:
    """Return a workload as sessions in order of their start; a request that belongs to none is a session of one turn.

    Takes the arguments of ``open_arrivals`` and raises InputError as it does.
    """
    workload = _with(workload, trace)
    context = _context(workload, Context(seed, block_tokens, max_model_len, prefix_caching, saturation_rps, slo))
    if workload.trace is not None:
        _check(workload.trace, context, skipped)
        if turn_timing(workload.trace, trace_format(workload.trace)) != "open":
            return _begun(_adapted_sessions(replay_sessions(workload, context), workload, context))
        arrivals = replay(workload, context)
    elif workload.sessions is not None:
        return _begun(_adapted_sessions(synthetic_sessions(workload, context), workload, context))
    else:
        arrivals = synthetic(workload, context)
    arrivals = _adapted(arrivals, workload, context)
    if workload.reasoning is not None:
        return _begun(reasoning_sessions(arrivals, workload.reasoning, context))
    return _begun(Session(arrival.request.arrival_s, (Turn(arrival, 0.0),)) for arrival in arrivals)


def _context(workload: Workload, context: Context) -> Context:
    """With room left for the image that a prompt may begin with."""
    if workload.images is None:
        return context
    longest = context.max_model_len - most_tokens(workload.images, context.block_tokens)
    if longest < 2:
        raise InputError("workload.images.tokens", "the largest image leaves no room for a prompt", f"max_model_len is {context.max_model_len}")
    return replace(context, max_model_len=longest)


def _adapted(arrivals: Iterator[Arrival], workload: Workload, context: Context) -> Iterator[Arrival]:
    if workload.images is not None:
        arrivals = pictured_arrivals(arrivals, workload.images, context)
    return arrivals if workload.adapters is None else adapted_arrivals(arrivals, workload.adapters, context)


def _adapted_sessions(sessions: Iterator[Session], workload: Workload, context: Context) -> Iterator[Session]:
    if workload.images is not None:
        sessions = pictured_sessions(sessions, workload.images, context)
    return sessions if workload.adapters is None else adapted_sessions(sessions, workload.adapters, context)


def _with(workload: Workload, trace: Trace | None) -> Workload:
    return workload if trace is None else workload.model_copy(update={"trace": trace})


def _check(trace: Trace, context: Context, skipped: dict[str, int] | None) -> None:
    """Check all rows, and tell what was left out; the replay itself counts into the context's own dict."""
    counted = replace(context, skipped={} if skipped is None else skipped)
    check(trace, counted)


def _begun(items: Iterator[Item]) -> Iterator[Item]:
    """Draw the first item now: mistakes show before anything is simulated."""
    first = next(items, None)
    if first is None:
        raise InputError("workload", "no request ever arrives", "see workload.requests, duration_s, arrivals and trace")
    return chain((first,), items)
