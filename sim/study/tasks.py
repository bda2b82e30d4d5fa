"""Carrying out the tasks of a study: finished ones are looked up, the rest computed, and a crash costs one retry."""

from __future__ import annotations

import gc
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from typing import Any, NamedTuple

from serving.errors import InputError
from sim.study.executors import PoolInUse
from sim.study.points import Points

OK, REFUSED, FAILED, CRASHED = "ok", "refused", "failed", "crashed"
_HOPELESS = 3  # points lost in a row from the start: nothing will come of the rest
_KEPT = (OK, REFUSED)  # deterministic answers; a failure may be mended, so it's tried again next time


class Task(NamedTuple):
    """``function(*arguments)`` returns plain JSON data; ``key`` names it in the points file."""

    key: str
    function: Callable[..., Any]
    arguments: tuple


class Answer(NamedTuple):
    """``kind`` ok: ``value`` is the result; refused: what InputError said; failed or crashed: a line about it."""

    kind: str
    value: Any


def run_batch(calls: list[tuple[Callable[..., Any], tuple]]) -> list[Answer]:
    """Run calls one after the other; nothing they raise gets out, so that what does is trouble with the worker."""
    answers = []
    for function, arguments in calls:
        try:
            answers.append(Answer(OK, function(*arguments)))
        except InputError as error:
            answers.append(Answer(REFUSED, {"where": error.where, "problem": error.problem, "hint": error.hint}))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            answers.append(Answer(FAILED, f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"))
        gc.collect()
    return answers


def carry_out(
    tasks: Iterable[Task], use: PoolInUse, points: Points, progress: Callable[[int, int | None], None] | None = None
) -> dict[str, Answer]:
    """Return the answer of every task by key. Finished ones come from ``points``; new ones are added there at once.

    When a worker dies, what was under way is run again with nothing beside it; a task whose worker dies then, and once more, is
    answered ``crashed``. The order in which tasks finish affects nothing. Raises InputError when the disk refuses a point.
    """
    wanted = list({task.key: task for task in tasks}.values())
    answers = {task.key: Answer(*points[task.key]) for task in wanted if task.key in points}
    done, computed, crashes = len(answers), 0, 0
    for task, answer in _compute((task for task in wanted if task.key not in answers), use):
        answers[task.key] = answer
        if answer.kind in _KEPT:
            points.add(task.key, answer)
        computed, crashes = computed + 1, crashes + (answer.kind == CRASHED)
        if crashes == computed == _HOPELESS:
            raise InputError("workers", f"die at once: none of {crashes} points could be computed", "--jobs 1 computes in this process and shows why")
        done += 1
        if progress is not None:
            progress(done, len(wanted))
    return answers


def _compute(tasks: Iterator[Task], use: PoolInUse) -> Iterator[tuple[Task, Answer]]:
    under_way: dict[Future, list[Task]] = {}
    while True:
        wanted = 2 * use.pool.width if use.pool.width > 1 else 1  # one more for each worker, so that none ever waits
        for batch in _batches(tasks, use.pool.batch, wanted - len(under_way)):
            under_way[_submit(use, batch)] = batch
        if not under_way:
            return
        finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
        if any(isinstance(future.exception(), BrokenExecutor) for future in finished):
            yield from _after_a_crash(under_way, use)
            under_way = {}
            continue
        for future in [future for future in under_way if future in finished]:
            yield from zip(under_way.pop(future), future.result())


def _batches(tasks: Iterator[Task], size: int, count: int) -> Iterator[list[Task]]:
    for _ in range(count):
        batch = list(itertools.islice(tasks, size))
        if not batch:
            return
        yield batch


def _submit(use: PoolInUse, batch: list[Task]) -> Future:
    try:
        return use.pool.submit(run_batch, [(task.function, task.arguments) for task in batch])
    except BrokenExecutor as error:  # broke between two submissions
        future: Future = Future()
        future.set_exception(error)
        return future


def _after_a_crash(under_way: dict[Future, list[Task]], use: PoolInUse) -> Iterator[tuple[Task, Answer]]:
    """Finish what was under way when a worker died: one at a time, so that it shows which task kills its worker."""
    wait(under_way, timeout=60)
    use.renew()
    for future, batch in under_way.items():
        if future.done() and future.exception() is None:
            yield from zip(batch, future.result())
        else:
            yield from ((task, _alone(task, use)) for task in batch)


def _alone(task: Task, use: PoolInUse) -> Answer:
    """Run a task with nothing beside it, and once more if its worker dies."""
    for _ in range(2):
        try:
            return _submit(use, [task]).result()[0]
        except BrokenExecutor:
            use.renew()
    return Answer(CRASHED, "its worker process died twice")
