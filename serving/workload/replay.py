"""Requests of a recorded workload: rows sliced, looped, scaled and labelled, open or as sessions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise

from serving.errors import InputError
from serving.request import Arrival, Request
from serving.scenario.fields import data_file
from serving.scenario.workload import Trace, Workload
from serving.workload.adapters import with_adapter
from serving.workload.classes import Labels
from serving.workload.context import Context
from serving.workload.lengths import MAX_TOKENS, one_by_one
from serving.workload.sessions import Session, Turn
from serving.workload.synthetic import bounded
from serving.workload.traces import Format, TraceRow, find_format, read

WITHOUT_TOKENS = "rows without prompt or output tokens"


def trace_format(spec: Trace) -> Format:
    """Return the format of a trace, given or recognised. Raises InputError."""
    return find_format(data_file(spec.file), spec.format)


def turn_timing(spec: Trace, known: Format) -> str:
    """Say when turns come: as the scenario asks, else as the format does by itself; open where rows belong to no session."""
    timing = spec.turn_timing or known.turn_timing
    if timing == "open":
        return timing
    first = next(read(data_file(spec.file), known), None)
    return timing if first is not None and first.session is not None else "open"


def check(spec: Trace, context: Context) -> None:
    """Read one pass of a trace through, so that a broken row ends the command before it has begun to write. Raises InputError."""
    first = None
    for row in rows(spec.model_copy(update={"loop": 1}), context.skipped):
        first = first or row
        if (row.arrival_s is None) != (first.arrival_s is None):
            raise InputError(row.where, "some rows have an arrival time and some have none")
        if (row.session is None) != (first.session is None):
            raise InputError(row.where, "some rows have a session and some have none")
        if row.hash_ids and context.prefix_caching:
            blocks_per_hash(row, context.block_tokens)


def blocks_per_hash(row: TraceRow, block_tokens: int) -> int:
    """Return the KV blocks that one content hash of a trace stands for. Raises InputError where that is no whole number."""
    blocks, rest = divmod(row.hash_tokens, block_tokens)
    if rest or not blocks:
        fitting = [str(each) for each in range(8, min(row.hash_tokens, 4096) + 1, 8) if row.hash_tokens % each == 0]
        raise InputError(
            "kv_cache.block_tokens",
            f"{block_tokens} does not divide the {row.hash_tokens} tokens that a prefix hash of {row.where} stands for",
            f"use {', '.join(fitting)}, or prefix_caching: false" if fitting else "set prefix_caching: false",
        )
    return blocks


def rows(spec: Trace, skipped: dict[str, int]) -> Iterator[TraceRow]:
    """Yield the rows of all passes, times from the start of the slice and not yet scaled, checked to be in order.

    Rows without tokens are counted in ``skipped``. Raises InputError at a broken row.
    """
    known = trace_format(spec)
    offset_s = 0.0
    for lap in range(spec.loop):
        kept, last_s = 0, 0.0
        for row in _slice(spec, known, skipped if lap == 0 else {}):
            kept += 1
            last_s = row.arrival_s or 0.0
            if lap:
                row = _later(row, known, lap, offset_s)
            yield row
        if not kept:
            raise InputError(spec.file, "no request is left of this trace", "see workload.trace: start_s, stop_s, first_row")
        # The next pass begins one mean gap after this one ended, so that the rate stays what it was.
        offset_s += last_s + (last_s / (kept - 1) if kept > 1 else 0.0)


def _later(row: TraceRow, known: Format, lap: int, offset_s: float) -> TraceRow:
    session = None if row.session is None else f"{row.session}@{lap}"
    shift = row.arrival_s is not None and not known.sessions_start_at_zero
    return row._replace(session=session, arrival_s=row.arrival_s + offset_s if shift else row.arrival_s)


def _slice(spec: Trace, known: Format, skipped: dict[str, int]) -> Iterator[TraceRow]:
    """Yield the rows of one pass that the slice keeps."""
    source = read(data_file(spec.file), known)
    if spec.sort:
        source = iter(sorted(source, key=lambda row: row.arrival_s or 0.0))
    timeless = known.sessions_start_at_zero
    first_s, previous_s, kept = None, -math.inf, 0
    for number, row in enumerate(source):
        if number < spec.first_row or not _has_tokens(row, spec, skipped):
            continue
        if row.arrival_s is None or timeless:
            if spec.start_s or spec.stop_s is not None:
                raise InputError(row.where, "start_s and stop_s need arrival times, which this trace does not have")
            yield row
        else:
            first_s = row.arrival_s if first_s is None else first_s
            arrival_s = row.arrival_s - first_s
            if arrival_s < previous_s:
                raise InputError(row.where, "arrives before the row above it", "set workload.trace.sort: true")
            previous_s = arrival_s
            if arrival_s < spec.start_s:
                continue
            if spec.stop_s is not None and arrival_s >= spec.stop_s:
                return
            yield row._replace(arrival_s=arrival_s - spec.start_s)
        kept += 1
        if kept == spec.limit:
            return


def _has_tokens(row: TraceRow, spec: Trace, skipped: dict[str, int]) -> bool:
    if row.prompt_tokens and row.output_tokens:
        return True
    if spec.zero_rows == "error":
        raise InputError(row.where, f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens", "set workload.trace.zero_rows: skip")
    skipped[WITHOUT_TOKENS] = skipped.get(WITHOUT_TOKENS, 0) + 1
    return False


class Replay:
    """Turns rows into requests: scales lengths, draws the class and tenant that a row lacks, expands content keys."""

    def __init__(self, workload: Workload, context: Context) -> None:
        self._spec = workload.trace
        self._context = context
        self._labels = Labels(workload, context)
        self._classes = one_by_one(self._labels.draw_classes)
        self._tenants = one_by_one(self._labels.draw_tenants)
        self._caps = [row.max_output_tokens or workload.max_output_tokens or MAX_TOKENS for row in self._labels.classes]
        self._cap = workload.max_output_tokens or MAX_TOKENS

    def arrival(self, row: TraceRow, request_id: int, arrival_s: float, session: int | None = None) -> Arrival:
        """Return the request of a row. Raises InputError when its content keys do not fit the KV block."""
        prompt = _scaled(row.prompt_tokens, self._spec.prompt_scale)
        output = _scaled(row.output_tokens, self._spec.output_scale)
        name, priority, cap = self._class_of(row)
        cap = max(1, min(row.max_output_tokens or cap, self._context.max_model_len - prompt))
        tenant = self._labels.tenants[next(self._tenants)] if row.tenant is None else row.tenant
        request = Request(
            request_id, arrival_s, prompt, cap, priority, name, tenant, session, self._keys(row, prompt), None, self._context.ttft_slo_s(name)
        )
        return Arrival(with_adapter(request, row.adapter) if row.adapter else request, min(output, cap))

    def _class_of(self, row: TraceRow) -> tuple[str, int, int]:
        """Return name, priority and cap: the row's own, else those of the scenario's class."""
        labels = self._labels
        if row.class_name is not None and row.class_name not in labels.names:
            return row.class_name, row.priority or 0, self._cap
        position = next(self._classes) if row.class_name is None else labels.names.index(row.class_name)
        priority = labels.priorities[position] if row.priority is None else row.priority
        return labels.names[position], priority, self._caps[position]

    def _keys(self, row: TraceRow, prompt: int) -> tuple[int, ...]:
        if not row.hash_ids or not self._context.prefix_caching:
            return ()
        size = self._context.block_tokens
        blocks = blocks_per_hash(row, size)
        keys = tuple(chain.from_iterable(range(each * blocks, (each + 1) * blocks) for each in row.hash_ids))
        return keys[: prompt // size]


def _scaled(tokens: int, scale: float) -> int:
    return tokens if scale == 1.0 else min(MAX_TOKENS, max(1, round(tokens * scale)))


def replay(workload: Workload, context: Context) -> Iterator[Arrival]:
    """Yield a trace's requests in order of arrival, ids from 0; where it has no times, ``workload.arrivals`` gives them."""
    maker = Replay(workload, context)
    stretch = workload.trace.time_scale / workload.trace.rate_scale
    starts: Iterator[float] | None = None
    sessions: dict[str, int] = {}
    for request_id, row in enumerate(rows(workload.trace, context.skipped)):
        if workload.closed_loop:
            arrival_s = 0.0
        elif row.arrival_s is None:
            starts = starts or _starts(workload, context, row)
            arrival_s = next(starts, None)
            if arrival_s is None:
                return
        else:
            arrival_s = row.arrival_s * stretch
        session = None if row.session is None else sessions.setdefault(row.session, len(sessions))
        yield maker.arrival(row, request_id, arrival_s, session)


def _starts(workload: Workload, context: Context, row: TraceRow) -> Iterator[float]:
    if workload.arrivals is None:
        raise InputError(row.where, "the trace has no arrival times", "add workload.arrivals")
    return chain.from_iterable(chunk.tolist() for chunk in bounded(workload, context))


def replay_sessions(workload: Workload, context: Context) -> Iterator[Session]:
    """Yield a trace's sessions in order of their start. All rows are read first: turns of a session may lie far apart.

    Where sessions have no start of their own, ``workload.arrivals`` spreads them; without it, agents all start at once.
    """
    spec = workload.trace
    known = trace_format(spec)
    maker = Replay(workload, context)
    context = replace(context, saturation_rps=None)  # it counts requests, the arrivals here start sessions
    recorded = turn_timing(spec, known) == "recorded"
    groups: dict[str | None, list[tuple[int, TraceRow]]] = {}
    for request_id, row in enumerate(rows(spec, context.skipped)):
        groups.setdefault(row.session, []).append((request_id, row))
    for turns in groups.values():
        _check_order([row for _, row in turns])
    timeless = known.sessions_start_at_zero and workload.arrivals is not None
    starts: Iterator[float] | None = None
    for number, turns in enumerate(groups.values()):
        first = turns[0][1]
        start_s: float | None = (first.arrival_s or 0.0) * spec.time_scale / spec.rate_scale
        if workload.closed_loop:
            start_s = 0.0
        elif timeless or first.arrival_s is None:
            starts = starts or _starts(workload, context, first)
            start_s = next(starts, None)
            if start_s is None:
                return
        yield _session(turns, number, start_s, maker, spec.time_scale, recorded)


def _check_order(turns: list[TraceRow]) -> None:
    for before, row in pairwise(turns):
        if row.turn <= before.turn:
            raise InputError(row.where, f"turn {row.turn} of session {row.session} comes after turn {before.turn}")
        if (row.arrival_s or 0.0) < (before.arrival_s or 0.0):
            raise InputError(row.where, f"turn {row.turn} of session {row.session} arrives before turn {before.turn}")


def _session(turns: list[tuple[int, TraceRow]], number: int, start_s: float, maker: Replay, time_scale: float, recorded: bool) -> Session:
    first_s = previous_s = turns[0][1].arrival_s or 0.0
    made = []
    for request_id, row in turns:
        arrival_s = row.arrival_s or 0.0
        arrival = maker.arrival(row, request_id, start_s, number)
        if recorded:
            made.append(Turn(arrival, 0.0, (arrival_s - first_s) * time_scale))
        else:
            made.append(Turn(arrival, (arrival_s - previous_s) * time_scale))
        previous_s = arrival_s
    return Session(start_s, tuple(made))
