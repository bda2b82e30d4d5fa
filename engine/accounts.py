"""What a run of the engine adds up to: metrics of its requests, totals of its steps, rows for the run directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.messages import Left, Step
from serving.metrics import ABORTED, CAPACITY, COMPLETED, ERROR, REJECTED, FleetTotals, Metrics
from serving.plan import BatchPlan
from serving.recording import Recording
from serving.sequence import DECODING

if TYPE_CHECKING:
    from serving.records import TableLog
    from serving.scheduler import Scheduler

STATUS = {"stop": COMPLETED, "length": COMPLETED, "kv_capacity": CAPACITY, "aborted": ABORTED, "error": ERROR, "rejected": REJECTED}
NAN = math.nan


class Accounts:
    """Observes a loop. ``path`` is (rows computed, ``graph`` or ``eager``) of the step that is being recorded."""

    def __init__(
        self, metrics: Metrics, recording: Recording | None, engine_steps: TableLog | None, progress: Callable[[int], None] | None = None
    ) -> None:
        self.path: tuple[int, str] = (0, "eager")
        self.end_s = 0.0
        self.busy_s = 0.0
        self.steps = 0
        self._metrics = metrics
        self._recording = recording
        self._engine_steps = engine_steps
        self._progress = progress
        self._left = 0
        self._kv_block_seconds = 0.0
        self._kv_max_blocks = 0
        self._prompt_tokens = self._cached_tokens = 0
        self._drafts = Drafts()

    def submitted(self, request_id: int) -> None:
        """A request was queued."""
        if self._recording is not None:
            self._recording.submitted(0, request_id)

    def aborted(self, request_id: int) -> None:
        """A request was dropped."""
        if self._recording is not None:
            self._recording.aborted(0, request_id)

    def planned(self, plan: BatchPlan) -> None:
        """Count what was admitted and how much of it the prefix cache held."""
        if plan.admitted:
            chunk_of = dict(zip(plan.prefills, plan.chunks))
            for seq in plan.admitted:
                self._prompt_tokens += seq.known_tokens - (seq.state == DECODING)
                self._cached_tokens += chunk_of[seq][1]
        if self._recording is not None:
            self._recording.planned(0, plan)

    def stepped(self, step: Step) -> None:
        """Add a committed step."""
        self.end_s = step.end_s
        self.busy_s += step.duration_s
        self.steps += 1
        self._kv_block_seconds += step.used_blocks * step.duration_s
        self._kv_max_blocks = max(self._kv_max_blocks, step.used_blocks)
        if step.gaps_s:
            self._metrics.itl(step.gaps_s, [1] * len(step.gaps_s), [step.end_s] * len(step.gaps_s))
        if step.plan.accepted:
            self._drafts.note(step)
        if self._recording is not None:
            path = step.output.path
            self.path = (path.rows, path.kind)
            self._recording.step(0, step.plan, step.begin_s, step.end_s, step.used_blocks, step.finished, duration_s=step.duration_s)
        if self._engine_steps is not None:
            self._engine_steps.append(_row(step))
            self._engine_steps.flush_if_full()

    def left(self, left: Left) -> None:
        """Add a request that left."""
        request, seq, metrics = left.request, left.seq, self._metrics
        mine = (0, 0, NAN, NAN, 0) if seq is None else (seq.cached_tokens, seq.generated, seq.scheduled_s, seq.first_token_s, seq.preemptions)
        cached, generated, scheduled_s, first_token_s, preemptions = mine
        metrics.finish(
            (
                request.request_id, metrics.class_index(request.class_name), request.arrival_s, request.prompt_tokens, cached, generated,
                scheduled_s, first_token_s, left.time_s, preemptions, 0, STATUS[left.status],
            )
        )  # fmt: skip
        metrics.flush_if_full()
        self.end_s = max(self.end_s, left.time_s)
        self._left += 1
        if self._progress is not None:
            self._progress(self._left)

    def drafts(self) -> dict[str, float | int | None]:
        """The ``speculation`` part of summary.json."""
        return self._drafts.report()

    def totals(self, scheduler: Scheduler, *, gpus: int, gpu_usd_per_h: float | None) -> FleetTotals:
        """What the engine counted."""
        return FleetTotals(
            duration_s=self.end_s, replicas=1, gpus=gpus, gpu_usd_per_h=gpu_usd_per_h, busy_s=self.busy_s, steps=self.steps,
            events=self.steps + self._left, kv_blocks=scheduler.pool.total, kv_block_seconds=self._kv_block_seconds,
            kv_max_fraction=self._kv_max_blocks / scheduler.pool.total, preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens, cached_tokens=self._cached_tokens, in_flight=scheduler.waiting_count + scheduler.running.count,
        )  # fmt: skip


class Drafts:
    """Sums over the steps that verified drafts."""

    def __init__(self) -> None:
        self._steps = self._decodes = self._tokens = self._drafts = self._tested = 0

    def note(self, step: Step) -> None:
        """Add a step."""
        self._steps += 1
        self._decodes += sum(1 for tokens in step.plan.accepted if tokens)
        self._tokens += sum(step.plan.accepted)
        self._drafts += step.drafts[0]
        self._tested += step.drafts[1]

    def report(self) -> dict[str, float | int | None]:
        """The ``speculation`` part of summary.json: drafts and tokens of a decode in a step, and the share of drafts accepted behind accepted ones."""
        decodes, tested = self._decodes, self._tested
        return {
            "steps": self._steps,
            "draft_tokens": self._drafts / decodes if decodes else None,
            "acceptance": (self._tokens - decodes) / tested if tested else None,
            "acceptance_length": self._tokens / decodes if decodes else None,
        }


def _row(step: Step) -> tuple:
    """A row of engine_steps.parquet."""
    plan, times, path = step.plan, step.output.times, step.output.path
    return (
        plan.step, path.kind, path.rows, query_key_pairs(plan.chunks), sum(before for _, before in plan.chunks), plan.logits_rows,
        step.schedule_s, step.prepare_s + times.prepare_s, times.launch_s, times.sample_s, times.post_s, times.device_s,
        step.measured_s, step.reference_s, step.events_before_commits,
    )  # fmt: skip


def query_key_pairs(chunks: Iterable[tuple[int, int]]) -> int:
    """Pairs of a query and a key it attends to, over all chunks of (new tokens, context before)."""
    return sum(new * before + new * (new + 1) // 2 for new, before in chunks)
