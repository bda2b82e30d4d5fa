"""Tells after each simulated step which requests got tokens from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serving.plan import BatchPlan
from serving.scheduler import HAND_OVER
from serving.sequence import Sequence as RunningSequence


class TokenTap:
    """Stands where a recording would (``serving.recording.Recording``), in a fleet whose replicas take one step at a time.

    ``on_step(end_s, tokens by request)``; their values nobody knows. ``on_submit(replica, request id)``. ``keeps_first``: a request that
    goes on elsewhere has its first token there, and it is not told of here.
    """

    every_step = True

    def __init__(
        self,
        on_step: Callable[[float, dict[int, Sequence[int]]], None],
        on_submit: Callable[[int, int], None],
        *,
        keeps_first: bool = False,
    ) -> None:
        self._on_step, self._on_submit, self._keeps_first = on_step, on_submit, keeps_first
        self._decoding: dict[tuple[int, int], list[RunningSequence]] = {}

    def submitted(self, replica: int, request_id: int) -> None:
        """A request has come to a replica."""
        self._on_submit(replica, request_id)

    def aborted(self, replica: int, request_id: int) -> None:
        """Part of a recording's interface."""

    def planned(self, replica: int, plan: BatchPlan) -> None:
        """Note who decodes, which can be asked only now."""
        if plan.decodes:
            self._decoding[replica, plan.step] = plan.decoding()

    def step(
        self, replica: int, plan: BatchPlan, start_s: float, end_s: float, used: int, finished: list[tuple[RunningSequence, str]]
    ) -> None:
        """A step was committed: each of its sequences got a token, or as many as were accepted."""
        decoding = self._decoding.pop((replica, plan.step), ())
        produced: dict[int, Sequence[int]] = {seq.request_id: (0,) for seq in decoding}
        for seq, accepted in zip(plan.speculating, plan.accepted):
            if accepted:
                produced[seq.request_id] = (0,) * accepted
            else:
                del produced[seq.request_id]
        for seq in plan.completing:
            produced[seq.request_id] = (0,)
        if self._keeps_first:
            for seq, reason in finished:
                if reason == HAND_OVER:
                    produced.pop(seq.request_id, None)
        self._on_step(end_s, produced)
