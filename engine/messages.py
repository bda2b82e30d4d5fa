"""What a loop is given and what it tells: submissions, steps, departures."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from engine.sampling import GREEDY, SamplingParams
from engine.step import StepOutput
from serving.plan import BatchPlan
from serving.request import Request
from serving.sequence import Sequence


class Submission(NamedTuple):
    """A request with its prompt. ``output_tokens`` pins the length; None: it ends at a stop token or at its limit."""

    request: Request
    prompt: list[int]
    output_tokens: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    sampling: SamplingParams = GREEDY


class Left(NamedTuple):
    """A request that has left. ``seq`` is None when it was refused; ``status``: stop, length, kv_capacity, aborted, error, rejected."""

    request: Request
    seq: Sequence | None
    time_s: float
    status: str
    detail: str = ""


class Step(NamedTuple):
    """A step that was executed and committed, for accounts and records. Host seconds as measured."""

    plan: BatchPlan
    begin_s: float
    end_s: float
    duration_s: float
    measured_s: float
    reference_s: float
    schedule_s: float
    prepare_s: float
    output: StepOutput
    used_blocks: int
    events_before_commits: list[int]  # by commit since the plan before: how many of the submissions and aborts this plan saw came first
    finished: list[tuple[Sequence, str]]
    gaps_s: list[float]  # between each token of this step and the one before it of the same request
    drafts: tuple[int, int] = (0, 0)  # verified, and those of them that followed accepted ones only


class Observer(Protocol):
    """Told of what happens, in the engine's thread and in order."""

    def submitted(self, request_id: int) -> None:
        """A request was queued."""

    def aborted(self, request_id: int) -> None:
        """A request was dropped."""

    def planned(self, plan: BatchPlan) -> None:
        """A plan that is not empty was made."""

    def stepped(self, step: Step) -> None:
        """A step was committed."""

    def left(self, left: Left) -> None:
        """A request left."""
