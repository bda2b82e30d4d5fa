"""What one replica's steps add to the figures of a run: pages in use over time, and the gaps between tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from serving.metrics import ABORTED, CAPACITY, COMPLETED, REJECTED
from serving.plan import BatchPlan
from serving.request import Request
from serving.scheduler import Scheduler
from serving.sequence import DECODING, Sequence

if TYPE_CHECKING:
    from serving.metrics import Metrics


_STATUS = {"stop": COMPLETED, "length": COMPLETED, "kv_capacity": CAPACITY, "aborted": ABORTED}


class PageAccount:
    """Integral over time of the pages in use, step by step, so that it is the same however steps are grouped into runs."""

    __slots__ = ("block_seconds", "first_blocks", "max_blocks", "steps", "used_blocks")

    def __init__(self) -> None:
        self.block_seconds = 0.0
        self.max_blocks = 0
        self.first_blocks = 0  # in the first step of the run in flight
        self.used_blocks = 0  # in the first step of the run in flight that is not in the account yet
        self.steps = 0  # of that run that are in the account

    def begin(self, used_blocks: int) -> None:
        """A run starts; its first step has ``used_blocks`` in use."""
        self.used_blocks = self.first_blocks = used_blocks
        self.steps = 0
        if used_blocks > self.max_blocks:
            self.max_blocks = used_blocks

    def add(self, scheduler: Scheduler, plan: BatchPlan, durations: list[float], until: int) -> None:
        """Add the first ``until`` steps of the run, as far as they are not in yet. What the first uses is known, what the others take
        follows from the phases: to be called before the scheduler takes their pages.
        """
        step = self.steps
        if step == until:
            return
        used, total, last = self.used_blocks, self.block_seconds, len(durations) - 1
        if step == last:
            total += used * durations[step]
        else:
            phases, width = scheduler.phases, scheduler.pool.block_tokens
            clock = plan.clock + step + 1 - plan.steps
            for duration_s in durations[step : min(until, last)]:
                total += used * duration_s
                used += phases[clock % width]
                clock += 1
            if until > last:
                total += used * durations[last]
            if used > self.max_blocks:
                self.max_blocks = used
        self.steps = until
        self.used_blocks = used
        self.block_seconds = total


class TokenGaps:
    """Gaps between successive tokens of one client. A decode step is one as long as itself, for all it decodes; a sequence that has
    just been prefilled, or had to pause, has a longer one.
    """

    __slots__ = ("_fresh", "_gave_up", "_metrics", "lost_decodes")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._fresh: dict[Sequence, None] = {}  # sequences whose latest token came after the latest decode step
        self._gave_up: list[Sequence] = []  # aborted while the step in flight decodes them: its tokens reach nobody
        self.lost_decodes = 0  # decodes of the next step whose sequences have ended already

    def fresh(self, sequences: list[Sequence]) -> None:
        """These have just had a token from elsewhere than a decode step, at their own ``token_s``."""
        self._fresh.update(dict.fromkeys(sequences))

    def aborted(self, seq: Sequence, in_flight: bool) -> None:
        """``seq`` is gone; ``in_flight``: the step being executed decodes it."""
        if in_flight:
            self._gave_up.append(seq)
        else:
            self._fresh.pop(seq, None)

    def clear(self) -> None:
        """Forget everybody."""
        self._fresh.clear()
        self._gave_up.clear()
        self.lost_decodes = 0

    def decoded(self, plan: BatchPlan, decoded_s: float, start_s: float, durations: list[float], ends: list[float]) -> None:
        """Add a run of decode steps that began at ``start_s``; the one before it ended at ``decoded_s``."""
        count = plan.decodes - self.lost_decodes
        weights = [count] * len(durations)
        if plan.withdrawn:
            weights[-1] -= plan.withdrawn
        metrics = self._metrics
        if self._fresh or decoded_s != start_s:
            first_gap_s = durations[0] if decoded_s == start_s else ends[0] - decoded_s
            self._first(plan, ends[0], first_gap_s, weights[0])
            if len(durations) > 1:
                metrics.itl(durations[1:], weights[1:], ends[1:])
        else:
            metrics.gaps_s.extend(durations)
            metrics.gap_weights.extend(weights)
            if metrics.windowed:
                metrics.gap_ends_s.extend(ends)
        self._gave_up.clear()

    def _first(self, plan: BatchPlan, end_s: float, gap_s: float, count: int) -> None:
        """Gaps that end with the first decode step after others: ``count`` in all, some of which began with a prefill's token."""
        stayed = self._gave_up if plan.steps > 1 else ()  # those who gave up in a later step of the run saw this one's token
        fresh = [
            seq for seq in self._fresh if (seq.state == DECODING and seq.entry_clock < plan.clock) or seq in stayed or seq in plan.departed
        ]
        gaps, weights = [end_s - seq.token_s for seq in fresh], [1] * len(fresh)
        if count > len(fresh):
            gaps.append(gap_s)
            weights.append(count - len(fresh))
        self._metrics.itl(gaps, weights, [end_s] * len(gaps))
        self._fresh.clear()

    def recomputed(self, completing: list[Sequence], end_s: float) -> None:
        """Prefills end; those that had tokens before were preempted, and their clients saw a long gap."""
        for seq in completing:
            if not math.isnan(seq.token_s):
                self._metrics.itl([end_s - seq.token_s], [1], [end_s])


class RowWriter:
    """Turns requests that leave a replica into rows of the metrics; ``label`` is the replica's number in them."""

    __slots__ = ("_append", "_label", "_metrics")

    def __init__(self, metrics: Metrics, label: int) -> None:
        self._metrics = metrics
        self._append = metrics.finish
        self._label = label

    def left(self, seq: Sequence, now_s: float, reason: str) -> None:
        """``seq`` has left, for ``reason``."""
        request, metrics = seq.request, self._metrics
        self._append(
            (
                request.request_id, metrics.class_index(request.class_name), request.arrival_s, request.prompt_tokens, seq.cached_tokens,
                seq.generated, seq.scheduled_s, seq.first_token_s, now_s, seq.preemptions, self._label, _STATUS[reason],
            )
        )  # fmt: skip
        metrics.flush_if_full()

    def refused(self, request: Request, now_s: float) -> None:
        """``request`` was turned away."""
        nan, index = math.nan, self._metrics.class_index(request.class_name)
        self._append((request.request_id, index, request.arrival_s, request.prompt_tokens, 0, 0, nan, nan, now_s, 0, self._label, REJECTED))
