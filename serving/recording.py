"""Step and plan records of a run, appended to the run directory's tables."""

from __future__ import annotations

from collections.abc import Callable

from serving.plan import BatchPlan
from serving.records import TableLog
from serving.sequence import Sequence


class Recording:
    """Writes ``steps.parquet`` and, when asked, ``plans.parquet`` rows; either log may be None.

    ``path`` is the latency model's, if it has one: (executed size, ``graph`` or ``eager``) of a step.
    """

    def __init__(self, steps: TableLog | None, plans: TableLog | None, path: Callable[[BatchPlan], tuple[int, str]] | None = None) -> None:
        self._path = path
        self._steps = steps
        self._plans = plans
        self._arrived: dict[int, tuple[list[int], list[int]]] = {}  # by replica: submitted and aborted since its latest plan
        self._seen: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # the same by (replica, step), as that plan saw them

    @property
    def every_step(self) -> bool:
        """Whether every step needs a row of its own."""
        return self._plans is not None

    def submitted(self, replica: int, request_id: int) -> None:
        """Note a submission: the next plan of that replica is the first to see it."""
        if self._plans is not None:
            self._arrived.setdefault(replica, ([], []))[0].append(request_id)

    def aborted(self, replica: int, request_id: int) -> None:
        """Note an abort, likewise."""
        if self._plans is not None:
            self._arrived.setdefault(replica, ([], []))[1].append(request_id)

    def planned(self, replica: int, plan: BatchPlan) -> None:
        """The replica made a plan: it saw what was noted until now."""
        if self._plans is not None:
            self._seen[replica, plan.step] = self._arrived.pop(replica, ([], []))

    def step(
        self, replica: int, plan: BatchPlan, start_s: float, end_s: float, used: int, finished: list[tuple[Sequence, str]], *,
        duration_s: float | None = None,
    ) -> None:  # fmt: skip
        """Append a committed plan, which may stand for several decode-only steps.

        ``duration_s`` is what was added to ``start_s``, where rounding might tell it from their difference.
        """
        if duration_s is None:
            duration_s = end_s - start_s
        if self._steps is not None:
            size, kind = self._path(plan) if self._path is not None else (0, "eager")
            self._steps.append(
                (
                    plan.step, replica, start_s, duration_s, sum(new for new, _ in plan.chunks), len(plan.chunks), plan.decodes,
                    plan.decode_context_tokens, used, size if kind == "graph" else 0, len(plan.preempted), plan.steps,
                )
            )  # fmt: skip
            self._steps.flush_if_full()
        if self._plans is not None:
            chunks = [{"request_id": seq.request_id, "new_tokens": new} for seq, (new, _) in zip(plan.prefills, plan.chunks)]
            submitted, aborted = self._seen.pop((replica, plan.step))
            self._plans.append(
                (
                    plan.step, plan.now_s, end_s, submitted, aborted, chunks,
                    [seq.request_id for seq in plan.preempted], [], [seq.request_id for seq, _ in finished], replica, list(plan.accepted),
                )
            )  # fmt: skip
            self._plans.flush_if_full()
