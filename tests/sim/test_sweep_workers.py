"""Workers that die, disks that fill, folders that are taken: finished points are kept, the rest is told."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import BrokenExecutor, Future

import pytest
from studies import SMALL, collector, die, die_once, double, refuse, stumble

from serving.errors import InputError
from serving.scenario import from_mapping
from sim.study.executors import PoolInUse, Processes, open_pool
from sim.study.points import Points, key_of
from sim.study.sweep import points_of, run_sweep
from sim.study.tasks import Task, carry_out


def test_a_crash_costs_one_retry_and_hurts_nobody_else(tmp_path):
    tasks = [Task(f"d{i}", double, (i,)) for i in range(6)]
    tasks[2:2] = [Task("crash", die, (1,)), Task("once", die_once, (str(tmp_path / "marker"),)), Task("gc", collector, (0,))]
    gc.disable()
    try:
        with Points(tmp_path / "out") as store, open_pool("local", 2) as use:
            answers = carry_out(tasks, use, store)
    finally:
        gc.enable()
    assert [answers[f"d{i}"] for i in range(6)] == [("ok", 2 * i) for i in range(6)]
    assert answers["once"] == ("ok", "second try")
    assert answers["crash"].kind == "crashed" and "died twice" in answers["crash"].value
    assert answers["gc"].value[0] is True and answers["gc"].value[1] > 10_000 and answers["gc"].value[-1], "workers have settings of their own"
    with Points(tmp_path / "out") as store:
        assert "crash" not in store and len(store) == 8, "a crashed point is tried again by the next run"


class Doomed:
    """A pool whose workers never live."""

    width, batch = 2, 1

    def submit(self, function, *arguments):
        future = Future()
        future.set_exception(BrokenExecutor("dead"))
        return future

    def renewed(self):
        return self


def test_workers_that_never_live_end_the_study():
    tasks = [Task(str(i), double, (i,)) for i in range(50)]
    with Points(None) as store, pytest.raises(InputError, match="none of 3 points could be computed"):
        carry_out(tasks, PoolInUse(Doomed()), store)


def test_what_a_task_raises_is_an_answer():
    with Points(None) as store, open_pool(jobs=1) as use:
        answers = carry_out([Task("a", refuse, (1,)), Task("b", stumble, (1,))], use, store)
    assert answers["a"] == ("refused", {"where": "here", "problem": "cannot", "hint": "hint"})
    assert answers["b"].kind == "failed" and answers["b"].value.startswith("ZeroDivisionError: oh (")


def test_finished_tasks_are_looked_up():
    with Points(None) as store, open_pool(jobs=1) as use:
        carry_out([Task("a", double, (1,))], use, store)
        assert carry_out([Task("a", die, (1,))], use, store)["a"] == ("ok", 2)


def test_a_full_disk_keeps_what_was_finished(tmp_path, monkeypatch):
    with Points(tmp_path) as store, open_pool(jobs=1) as use:
        carry_out([Task("a", double, (1,))], use, store)
        file, store._file = store._file, Full()
        with pytest.raises(InputError, match=r"No space left on device \(1 finished points are kept"):
            carry_out([Task("b", double, (2,))], use, store)
        store._file = file
    with Points(tmp_path) as store:
        assert "a" in store and "b" not in store


class Full:
    """A file on a disk without room."""

    def write(self, _: bytes) -> int:
        raise OSError(28, "No space left on device")


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        Points(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"holds 'thesis.tex'"):
        Points(tmp_path / "other")
    with Points(tmp_path / "taken"), pytest.raises(InputError, match="in use by another study"):
        Points(tmp_path / "taken")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "points.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match=r"points.jsonl:1: is no point"):
        Points(tmp_path / "broken")


def test_a_key_holds_everything_that_decides(tmp_path):
    trace = tmp_path / "trace.csv"
    resolved = from_mapping(SMALL).resolved()
    base = from_mapping({**resolved, "workload": {"trace": {"file": str(trace)}}}) if trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n") else None
    first = points_of(base, [{"seed": 1}, {"seed": 2}], 1)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    os.utime(trace, ns=(time.time_ns(), time.time_ns() + 10**9))
    second = points_of(base, [{"seed": 1}], 1)
    assert len({first[0].key, first[1].key, second[0].key}) == 3, "seed and content of files count"
    assert key_of("a", {"x": 1, "y": 2}) == key_of("a", {"y": 2, "x": 1}) != key_of("b", {"x": 1, "y": 2})


def test_unknown_backends_and_job_counts_are_refused():
    for backend, jobs, message in (("rey", 1, "did you mean 'ray'"), ("local", 0, "--jobs")):
        with pytest.raises(InputError, match=message), open_pool(backend, jobs):
            pass


def test_closing_a_pool_ends_its_work():
    pool = Processes(1)
    future = pool.submit(time.sleep, 60)
    while not future.running():
        time.sleep(0.01)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10


def test_ray_makes_the_same_table(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'twinserve[ray]'")
    points = points_of(from_mapping({**SMALL, "workload": {**SMALL["workload"], "requests": 30}}), [{"cluster.replicas": n} for n in (1, 2, 3)], 1)
    with Points(None) as store, open_pool(jobs=1) as use:
        here = run_sweep(points, use, store)
    with Points(None) as store, open_pool("ray", 1) as use:
        assert run_sweep(points, use, store) == here
        answers = carry_out([Task("crash", os._exit, (13,)), Task("fine", abs, (-3,))], use, store)
        assert answers["crash"].kind == "crashed" and answers["fine"] == ("ok", 3)
