"""Where the points of a study are computed: in this process, in a process pool, or on Ray. One interface, three ways.

A pool has ``width`` (tasks that run at once), ``batch`` (points worth sending together), ``submit`` as in concurrent.futures,
``renewed()`` (a pool to go on with after a worker died) and ``close()``. A dead worker shows as BrokenExecutor. Ray is imported
only when it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from typing import Any, Protocol

from serving.errors import InputError, nearest

BACKENDS = ("local", "ray")
MAX_JOBS = 1024


class Pool(Protocol):
    """What a study needs of whatever runs its points."""

    width: int
    batch: int

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Run ``function`` somewhere."""

    def renewed(self) -> Pool:
        """Return a pool that works, after this one broke."""

    def close(self) -> None:
        """End it now; what still runs is abandoned."""


def default_jobs() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def open_pool(backend: str = "local", jobs: int | None = None) -> Iterator[PoolInUse]:
    """Open the pool of ``backend`` with ``jobs`` workers (default: the CPUs). Raises InputError for an unknown backend."""
    if backend not in BACKENDS:
        raise InputError("--backend", f"there is no backend '{backend}'", nearest(backend, BACKENDS))
    count = default_jobs() if jobs is None else jobs
    if not 1 <= count <= MAX_JOBS:
        raise InputError("--jobs", f"must lie between 1 and {MAX_JOBS}", f"got {count}")
    if backend == "ray":
        pool: Pool = RayPool(count)
    else:
        pool = ThisProcess() if count == 1 else Processes(count)
    holder = PoolInUse(pool)
    try:
        yield holder
    finally:
        holder.pool.close()


class PoolInUse:
    """Holds the pool that works at present."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def renew(self) -> None:
        """Replace the pool by one that works."""
        self.pool = self.pool.renewed()


class ThisProcess:
    """Runs each task when it is submitted: nothing to start, and nothing that could be lost between processes."""

    width = 1
    batch = 1

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Run ``function`` and return its finished future; what it raises is raised by the future, Ctrl-C at once."""
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def renewed(self) -> ThisProcess:
        """It never breaks: a crash would take the study with it."""
        return self

    def close(self) -> None:
        """There is nothing to end."""


class Processes:
    """A pool of fresh processes (spawn): they inherit neither memory, nor threads, nor collector settings."""

    batch = 1

    def __init__(self, workers: int) -> None:
        import multiprocessing

        self.width = workers
        self._executor = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=begin_worker)

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Run ``function`` in one of the processes."""
        return self._executor.submit(function, *arguments)

    def renewed(self) -> Processes:
        """Return a pool of as many new processes."""
        self.close()
        return Processes(self.width)

    def close(self) -> None:
        """End the processes, in the middle of their work if need be."""
        workers = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
        self._executor.shutdown(wait=True)


class RayPool:
    """Tasks on Ray: on the cluster that RAY_ADDRESS names, else on one that is started here for the study.

    A task costs Ray about a millisecond and a message: points travel in batches.
    """

    batch = 8

    def __init__(self, workers: int) -> None:
        ray = _ray()
        self.width = workers
        self._started = not ray.is_initialized()
        if self._started:
            _start_ray(ray, workers)
        self._remote = ray.remote(max_retries=0)(_call)

    def submit(self, function: Callable, *arguments: Any) -> Future:
        """Run ``function`` on Ray; whatever goes wrong around it shows as BrokenExecutor."""
        inner = self._remote.remote(function, arguments).future()
        outer: Future = Future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def renewed(self) -> RayPool:
        """Ray replaces a dead worker by itself."""
        return self

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        if self._started:
            _ray().shutdown()


def _pass_on(done: Future, outer: Future) -> None:
    error = done.exception()
    if error is None:
        outer.set_result(done.result())
    else:
        outer.set_exception(BrokenExecutor(" ".join(str(error).split())[:300] or type(error).__name__))


def _call(function: Callable, arguments: tuple) -> Any:
    """What Ray runs: its workers live on, so each is prepared once."""
    global _prepared
    if not _prepared:
        _prepared = True
        begin_worker()
    return function(*arguments)


_prepared = False


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError("--backend", "ray is not installed", "install the extra: pip install 'twinserve[ray]'") from None
    return ray


def _start_ray(ray: Any, workers: int) -> None:
    import logging

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        else:  # on loopback Ray must be told its address, or it looks for one that the machine may not have
            ray.init(num_cpus=workers, _node_ip_address="127.0.0.1", **quiet)
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        raise InputError("--backend", f"ray does not start: {str(error).splitlines()[0][:200]}") from error


def begin_worker() -> None:
    """Prepare a worker: Ctrl-C is the parent's business, and the collector gets the settings of a run of its own."""
    from sim.cli import spare_the_collector

    with contextlib.suppress(ValueError):  # a worker thread, as some backends use, has no signals
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    spare_the_collector()
