"""Worker processes for code that may never return: each call has a time limit, behind which its process is killed and replaced."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from serving.errors import InputError

Call = tuple[Callable[..., Any], tuple]


@dataclass(frozen=True, slots=True)
class Lost:
    """A call without a result: its process was killed at the limit, or died by itself."""

    reason: str


class Workers:
    """``jobs`` processes. Use as a context manager: they end with it, whatever happens."""

    def __init__(self, jobs: int, limit_s: float) -> None:
        self._jobs = jobs
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._idle:
            worker.stop()

    def run(self, calls: Iterable[Call]) -> Iterator[tuple[int, Any]]:
        """Yield (position, result or Lost) of every call as it ends. An InputError in a call is raised here."""
        todo = deque(enumerate(calls))
        busy: dict[Connection, tuple[_Worker, int, float]] = {}
        try:
            while todo or busy:
                while todo and len(busy) < self._jobs:
                    worker = self._idle.pop() if self._idle else _Worker(self._context)
                    position, call = todo.popleft()
                    worker.pipe.send(call)
                    busy[worker.pipe] = (worker, position, time.monotonic() + self._limit_s)
                nearest_s = min(deadline for _, _, deadline in busy.values()) - time.monotonic()
                for pipe in wait(list(busy), max(0.0, nearest_s)):
                    worker, position, _ = busy.pop(pipe)
                    yield position, self._receive(worker)
                for pipe, (worker, position, deadline) in list(busy.items()):
                    if time.monotonic() >= deadline:
                        del busy[pipe]
                        worker.stop()
                        yield position, Lost(f"no answer within {self._limit_s:g} s: its process was killed")
        finally:
            for worker, _, _ in busy.values():
                worker.stop()

    def _receive(self, worker: _Worker) -> Any:
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            worker.stop()
            return Lost(f"its process died with exit code {worker.process.exitcode}")
        self._idle.append(worker)
        if kind == "input error":
            raise InputError(*value)
        return value


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, context: Any) -> None:
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def stop(self) -> None:
        """Kill the process: it holds nothing that could be lost."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    """Answer calls until the other side has gone."""
    import gc
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    gc.set_threshold(200_000, 20, 100)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("done", function(*arguments))
        except InputError as error:
            answer = ("input error", (error.where, error.problem, error.hint))
        pipe.send(answer)
