"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: steps, requests, transfers and KV use.

Trace Event Format, JSON object form (Google, "Trace Event Format", 2016): "X" complete slices for steps, nestable async "b"/"e" for
requests and their phases, "C" counters, "i" instants, "M" names. Times are microseconds. Each replica is a process; the fleet
itself is one more, which holds the requests that no replica served.

Events are written as batches of rows come in: memory holds one batch, whatever the length of the run.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from serving.errors import InputError
from serving.files import whole_file
from serving.records import REQUEST_COLUMNS, STAGE_COLUMNS, STEP_COLUMNS, open_run
from serving.run_checks import check_rows

Batch = Mapping[str, Sequence]  # columns of equal length, as plain Python lists
BATCH_ROWS = 8192
_FLEET = 1
_STEP_READ = ("replica", "start_s", "duration_s", "prefill_tokens", "prefill_seqs", "decode_seqs", "decode_context_tokens", "kv_blocks_used", "graph", "preempted", "steps")
_REQUEST_READ = tuple(name for name in REQUEST_COLUMNS if name != "preemptions")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3f}"


class _Names:
    """Yields the "M" events that name a process or a track the first time it is seen."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def of(self, pid: int, tid: int, track: str) -> Iterator[str]:
        if (pid, 0) not in self._seen:
            self._seen.add((pid, 0))
            name = "fleet" if pid == _FLEET else f"replica {pid - 2}"
            yield f'{{"ph":"M","name":"process_name","pid":{pid},"tid":0,"args":{{"name":"{name}"}}}}'
            yield f'{{"ph":"M","name":"process_sort_index","pid":{pid},"tid":0,"args":{{"sort_index":{pid}}}}}'
        if (pid, tid) not in self._seen:
            self._seen.add((pid, tid))
            yield f'{{"ph":"M","name":"thread_name","pid":{pid},"tid":{tid},"args":{{"name":"{track}"}}}}'


def step_events(batches: Iterable[Batch], names: _Names) -> Iterator[str]:
    """Slices of the steps, on as many tracks as a replica has plans in flight, and counters of KV blocks and batch size."""
    ends: dict[int, list[float]] = {}
    last: dict[int, tuple] = {}
    for batch in batches:
        for replica, start, duration, prefill, prompts, decodes, context, used, graph, preempted, steps in zip(*(batch[name] for name in _STEP_READ)):
            pid, lanes = replica + 2, ends.setdefault(replica, [])
            lane = next((i for i, end in enumerate(lanes) if start >= end - 5e-10), len(lanes))  # half of the nanosecond that is written
            lanes[lane : lane + 1] = [start + duration]
            yield from names.of(pid, lane + 1, "steps" if lane == 0 else f"steps, plan {lane + 1} in flight")
            name = "decode" if not prefill else "mixed" if decodes else "prefill"
            yield (
                f'{{"ph":"X","cat":"step","name":"{name}","pid":{pid},"tid":{lane + 1},"ts":{_us(start)},"dur":{_us(duration)},"args":{{"prefill_tokens":{prefill},'
                f'"prefill_seqs":{prompts},"decode_seqs":{decodes},"decode_context_tokens":{context},"graph":{graph},"preempted":{preempted},"steps":{steps}}}}}'
            )
            if last.get(pid) != (used, decodes, prompts):
                last[pid] = (used, decodes, prompts)
                yield f'{{"ph":"C","name":"KV blocks","pid":{pid},"tid":0,"ts":{_us(start)},"args":{{"used":{used}}}}}'
                yield f'{{"ph":"C","name":"batch","pid":{pid},"tid":0,"ts":{_us(start)},"args":{{"decode":{decodes},"prefill":{prompts}}}}}'


def request_events(batches: Iterable[Batch], names: _Names) -> Iterator[str]:
    """Each request as an async slice that holds its phases; one that never ran is an instant of the fleet."""
    quoted: dict[str, str] = {}
    for batch in batches:
        for request, kind, arrival, prompt, cached, output, scheduled, first, finish, replica, status in zip(*(batch[name] for name in _REQUEST_READ)):
            text = quoted.get(kind) or quoted.setdefault(kind, json.dumps(str(kind)))
            served = replica is not None and replica >= 0 and not math.isnan(finish)
            pid = replica + 2 if served and not math.isnan(scheduled) else _FLEET
            yield from names.of(pid, 0, "counters")
            args = f'{{"class":{text},"prompt_tokens":{prompt},"cached_tokens":{cached},"output_tokens":{output},"status":"{status}"}}'
            if pid == _FLEET:
                yield f'{{"ph":"i","s":"p","cat":"request","name":"request {request} {status}","pid":{pid},"tid":0,"ts":{_us(arrival)},"args":{args}}}'
                continue
            shared = f'"cat":"request","id":"{request}","pid":{pid},"tid":0'
            yield f'{{"ph":"b","name":"request {request}",{shared},"ts":{_us(arrival)},"args":{args}}}'
            first = finish if math.isnan(first) else first
            for phase, start, end in (("queue", arrival, scheduled), ("prefill", scheduled, first), ("decode", first, finish)):
                if end > start:
                    yield f'{{"ph":"b","name":"{phase}",{shared},"ts":{_us(start)}}}'
                    yield f'{{"ph":"e","name":"{phase}",{shared},"ts":{_us(end)}}}'
            yield f'{{"ph":"e","name":"request {request}",{shared},"ts":{_us(finish)}}}'


def stage_events(batches: Iterable[Batch], names: _Names) -> Iterator[str]:
    """What requests passed before a replica saw them, as async slices of the fleet: the wait, then the service, each a track by stage and site."""
    tracks: dict[str, str] = {}
    for batch in batches:
        for request, stage, site, entered, started, ended, outcome in zip(*(batch[name] for name in STAGE_COLUMNS)):
            name = f"{stage} at {site}" if site else stage
            text = tracks.get(name) or tracks.setdefault(name, json.dumps(name))
            yield from names.of(_FLEET, 0, "counters")
            shared = f'"cat":"stage","id":"s{request}","pid":{_FLEET},"tid":0'
            args = f'{{"request":{request},"outcome":{json.dumps(outcome)}}}'
            yield f'{{"ph":"b","name":{text},{shared},"ts":{_us(entered)},"args":{args}}}'
            if started > entered:
                yield f'{{"ph":"b","name":"waits",{shared},"ts":{_us(entered)}}}'
                yield f'{{"ph":"e","name":"waits",{shared},"ts":{_us(started)}}}'
            yield f'{{"ph":"e","name":{text},{shared},"ts":{_us(ended)}}}'


def transfer_events(transfers: Iterable[Mapping], names: _Names) -> Iterator[str]:
    """Transfers as async slices of the replica they leave: several may overlap on one link.

    Each has ``source`` (replica), ``target`` (text or replica), ``start_s``, ``duration_s`` and ``bytes``.
    """
    for index, transfer in enumerate(transfers):
        pid = transfer["source"] + 2
        yield from names.of(pid, 0, "counters")
        name = json.dumps(f"KV to {transfer['target']}")
        shared = f'"cat":"transfer","id":"t{index}","pid":{pid},"tid":0,"name":{name}'
        yield f'{{"ph":"b",{shared},"ts":{_us(transfer["start_s"])},"args":{{"bytes":{int(transfer["bytes"])}}}}}'
        yield f'{{"ph":"e",{shared},"ts":{_us(transfer["start_s"] + transfer["duration_s"])}}}'


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    """Open the file for text, gzipped when it ends in .gz (without a time stamp: equal runs give equal bytes)."""
    with whole_file(path) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=5, mtime=0) as packed:
                yield _Utf8(packed)
        else:
            yield _Utf8(raw)


class _Utf8:
    """Writes text to a binary file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(text.encode("utf-8"))


def write_trace(
    path: Path, steps: Iterable[Batch], requests: Iterable[Batch], *, stages: Iterable[Batch] = (), transfers: Iterable[Mapping] = (), label: str = ""
) -> int:
    """Write the timeline; return the number of events. Raises InputError when the disk refuses.

    ``steps``, ``requests`` and ``stages`` are batches of columns as in the tables of those names, steps in order of their start.
    """
    names, count = _Names(), 0
    with _opened(path) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{{"run":{json.dumps(label)}}},"traceEvents":[\n')
        waiting: list[str] = []
        for events in (step_events(steps, names), request_events(requests, names), stage_events(stages, names), transfer_events(transfers, names)):
            for event in events:
                waiting.append(event)
                if len(waiting) >= BATCH_ROWS:
                    file.write((",\n" if count else "") + ",\n".join(waiting))
                    count += len(waiting)
                    waiting.clear()
        file.write((",\n" if count and waiting else "") + ",\n".join(waiting) + "\n]}\n")
        return count + len(waiting)


def write_run_trace(folder: Path, path: Path) -> int:
    """Write the timeline of a recorded run directory; return the number of events.

    Raises InputError when the folder is no run directory or holds no records.
    """
    run = open_run(folder)
    for table in ("steps", "requests"):
        if not run.has(table):
            raise InputError(str(folder), f"has no {table}.parquet to draw", "run it without --no-records")
    steps, requests = _batches(folder / "steps.parquet", _STEP_READ, STEP_COLUMNS), _batches(folder / "requests.parquet", _REQUEST_READ, REQUEST_COLUMNS)
    stages = _batches(folder / "stages.parquet", tuple(STAGE_COLUMNS), STAGE_COLUMNS) if run.has("stages") else ()
    return write_trace(path, steps, requests, stages=stages, label=f"{run.summary.get('scenario')}, seed {run.summary.get('seed')}")


def _batches(path: Path, names: Sequence[str], known: Mapping[str, str]) -> Iterator[Batch]:
    """Yield the table's row groups in pieces, so that the whole table is never in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            missing = [name for name in known if name not in table.schema_arrow.names]
            if missing:
                raise InputError(str(path), f"lacks the column '{missing[0]}'")
            first_row = 0
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=list(names)):
                if known is not STAGE_COLUMNS:
                    check_rows(batch, {name: known[name] for name in names}, path, first_row)
                first_row += len(batch)
                yield batch.to_pydict()
    except (pa.ArrowException, OSError) as error:
        raise InputError(str(path), f"is not a readable parquet file: {str(error).splitlines()[0]}") from error
