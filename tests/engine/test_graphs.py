"""Which path a step takes, when graphs are captured again, and what happens when a capture fails."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import TINY, runner

from engine.graphs import DecodeGraphs, GraphStats, StepPath, plain_capture
from engine.loader import random_weights
from engine.step import SequenceInput, StepInput


class Bench:
    """A function of static buffers, a signature that can change, and captures that can fail."""

    def __init__(self, sizes, fails=()):
        self.captures: list[int] = []
        self.version = 0
        self.fails = set(fails)
        self.graphs = DecodeGraphs(sizes, lambda rows: torch.full((rows,), float(rows)), lambda rows: (rows, self.version), self.capture)

    def capture(self, run):
        rows = len(run())
        self.captures.append(rows)
        if rows in self.fails:
            raise RuntimeError("out of memory")
        return run


def test_a_batch_is_padded_to_the_next_captured_size():
    graphs = Bench([1, 4, 8]).graphs
    assert graphs.path(1, 0) == StepPath("graph", 1, 0)
    assert graphs.path(3, 0) == StepPath("graph", 4, 1)
    assert graphs.path(8, 0) == StepPath("graph", 8, 0)


def test_mixed_large_and_empty_batches_run_eagerly():
    graphs = Bench([1, 4, 8]).graphs
    assert graphs.path(3, 1) == StepPath("eager", 3, 0)
    assert graphs.path(9, 0) == StepPath("eager", 9, 0)
    assert graphs.path(0, 0).kind == "eager"
    assert Bench([]).graphs.path(1, 0).kind == "eager"


def test_capture_is_largest_first_and_once():
    bench = Bench([1, 8, 4, 4])
    bench.graphs.capture_all()
    assert bench.captures == [8, 4, 1]
    bench.graphs.replay(4)
    assert bench.captures == [8, 4, 1] and bench.graphs.stats == GraphStats(captured=3, replayed=1)


def test_a_changed_signature_recaptures_that_bucket_when_it_is_used():
    bench = Bench([1, 4])
    bench.graphs.capture_all()
    bench.version += 1
    bench.graphs.replay(4)
    bench.graphs.replay(4)
    assert bench.captures == [4, 1, 4] and bench.graphs.stats == GraphStats(captured=2, recaptured=1, replayed=2)


def test_a_failed_capture_leaves_that_bucket_eager_and_the_others_alone():
    bench = Bench([1, 4], fails=[4])
    assert bench.graphs.path(3, 0).kind == "graph"
    assert bench.graphs.replay(4).tolist() == [4.0] * 4  # this very step still gets its result
    assert bench.graphs.path(3, 0) == StepPath("eager", 3, 0)
    assert bench.graphs.path(1, 0).kind == "graph"
    assert bench.graphs.failures == {4: "out of memory"}
    bench.graphs.capture_all()
    assert bench.captures == [4, 1] and bench.graphs.stats.failed == 1


def test_the_cpus_graph_is_the_function_itself():
    def run():
        return torch.ones(1)

    assert plain_capture(run) is run


def test_a_runner_recaptures_after_its_weights_changed():
    engine = runner(graph_sizes=(1, 2))
    engine.warm_up()
    step = StepInput([SequenceInput(1, [7], 0, [1])])
    first = engine.execute(step).tokens[1]
    other = random_weights(TINY, 99, device=torch.device("cpu"), dtype=torch.float32)
    engine.decoder.weights = other
    engine.weights_changed()
    assert engine.execute(step).tokens[1] == runner(weights=other).execute(step).tokens[1] != first
    assert engine.graphs.stats == GraphStats(captured=2, recaptured=1, replayed=2)


def test_sizes_beyond_the_runner_are_not_captured():
    assert runner(max_seqs=3, graph_sizes=(1, 2, 4, 8)).graphs.buckets.sizes == (1, 2)
