"""What another engine did, step by step, as it did it: three files in a folder that ``vllm_run`` makes a run directory of.

``steps.jsonl``     a line per step; ``twinserve import step-log`` reads it as it is
``requests.jsonl``  a line per request that has left; ``twinserve import vllm-requests`` reads it as it is
``meta.json``       engine, versions, device, pool, scenario

Seconds count from the start of the log on one monotonic clock. A line is on disk when its step is over, so a server that is killed loses
nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serving.errors import InputError
from serving.sequence import Sequence

FILES = ("steps.jsonl", "requests.jsonl", "meta.json")


class Composition(NamedTuple):
    """What a planned step computes. ``chunks`` lists (request, new tokens, tokens before); ``tokens`` the requests that sample one."""

    chunks: list[tuple[int, int, int]]
    decodes: int
    decode_context_tokens: int
    tokens: list[int]

    @property
    def query_key_pairs(self) -> int:
        """Pairs of a query and a key that it attends to, over the chunks."""
        return sum(new * before + new * (new + 1) // 2 for _, new, before in self.chunks)


class Planned(NamedTuple):
    """A step that was planned: when planning began and ended, what it holds, whom it took in and put out, and the KV blocks held then.

    ``before_commits`` says, for each step that was over since the plan before, how many of ``submitted`` had come by then.
    """

    begin_s: float
    end_s: float
    work: Composition
    submitted: list[int]
    preempted: list[int]
    used_blocks: int
    before_commits: list[int]


class LogClock:
    """Seconds since its making: on the wall, and of this process's processors (all its threads)."""

    def __init__(self) -> None:
        self.unix_s = time.time()
        self.monotonic_s = time.monotonic()
        self._processor_s = time.process_time()

    def now_s(self) -> float:
        """Now."""
        return time.monotonic() - self.monotonic_s

    def processor_s(self) -> float:
        """Processor seconds that this process has used."""
        return time.process_time() - self._processor_s

    def of_unix_s(self, unix_s: float) -> float:
        """A time stamp of the system clock on this one; never before its start."""
        return max(0.0, unix_s - self.unix_s)


class StepLog:
    """Writes the folder. One thread writes."""

    def __init__(self, folder: Path, clock: LogClock, meta: Mapping[str, Any]) -> None:
        """Raises InputError when the folder cannot be written or holds another log."""
        self._clock = clock
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any((folder / name).exists() for name in FILES):
                raise InputError(str(folder), "holds a log already", "name another folder, or remove it")
            (folder / "meta.json").write_text(json.dumps(dict(meta), indent=1) + "\n", encoding="utf-8")
            self._steps = (folder / "steps.jsonl").open("w", encoding="utf-8", buffering=1)
            self._requests = (folder / "requests.jsonl").open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(str(folder), f"cannot be written: {error.strerror}") from None
        self._count = 0
        self._end_s = 0.0
        self._processor_s = 0.0
        self._busy = False
        self._began_processor_s = 0.0

    def idle(self) -> None:
        """There was nothing to do: the next step begins with its own planning, not at the end of the one before."""
        self._busy = False

    def begin_s(self, planned: Planned) -> tuple[float, float]:
        """When a step begins, on the wall and in processor seconds: at the end of the one before while there is work."""
        if self._busy:
            return self._end_s, self._processor_s
        return max(self._end_s, planned.begin_s), max(self._processor_s, self._began_processor_s)

    def wake(self) -> None:
        """Planning begins: note the processor's clock in case this ends a pause."""
        self._began_processor_s = self._clock.processor_s()

    def step(self, planned: Planned, arrived_s: float, finished: list[int], *, more: bool) -> None:
        """A step is over, now; its tokens ``arrived_s``. ``more``: there is more to do, so that the next step begins now."""
        end_s, processor_s = self._clock.now_s(), self._clock.processor_s()
        begin_s, began_processor_s = self.begin_s(planned)
        scheduled_s, work = max(begin_s, planned.end_s), planned.work
        line = {
            "step": self._count, "start_s": begin_s, "duration_s": end_s - begin_s, "prefill_tokens": sum(new for _, new, _ in work.chunks),
            "prefill_seqs": len(work.chunks), "decode_seqs": work.decodes, "decode_context_tokens": work.decode_context_tokens,
            "kv_blocks_used": planned.used_blocks, "graph": 0, "preempted": len(planned.preempted), "steps": 1,
            "planned_s": planned.begin_s, "schedule_s": scheduled_s - begin_s, "device_s": max(0.0, arrived_s - scheduled_s),
            "post_s": end_s - max(arrived_s, scheduled_s), "processor_s": processor_s - began_processor_s,
            "query_key_pairs": work.query_key_pairs, "prefill_context_tokens": sum(before for *_, before in work.chunks),
            "logits_rows": len(work.tokens), "chunks": work.chunks, "tokens": work.tokens, "submitted": planned.submitted,
            "preempted_ids": planned.preempted, "finished": finished, "events_before_commits": planned.before_commits,
        }  # fmt: skip
        self._steps.write(json.dumps(line) + "\n")
        self._count += 1
        self._end_s, self._processor_s, self._busy = end_s, processor_s, more

    def request(self, seq: Sequence, their_id: str, finish_s: float, status: str) -> None:
        """A request has left."""
        request, clock = seq.request, self._clock

        def stamp(time_s: float) -> float | None:
            return None if time_s != time_s else clock.monotonic_s + time_s

        line = {
            "request_id": request.request_id, "their_id": their_id, "arrival_time": clock.unix_s + request.arrival_s,
            "queued_ts": stamp(request.arrival_s), "scheduled_ts": stamp(seq.scheduled_s), "first_token_ts": stamp(seq.first_token_s),
            "last_token_ts": stamp(finish_s), "input_toks": request.prompt_tokens, "output_toks": seq.generated,
            "cached_toks": seq.cached_tokens, "preemptions": seq.preemptions, "priority": request.priority, "class": request.class_name,
            "status": status, "arrival_s": request.arrival_s, "scheduled_s": none_for_nan(seq.scheduled_s),
            "first_token_s": none_for_nan(seq.first_token_s), "finish_s": finish_s,
        }  # fmt: skip
        self._requests.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """No more will come."""
        self._steps.close()
        self._requests.close()


def none_for_nan(value: float) -> float | None:
    """JSON knows no NaN."""
    return None if value != value else value
