"""CUDA graphs for decode batches: a graph per batch bucket, padding up to it, a signature, recapture, and the eager way out.

A decode step of few sequences is bound by launching its kernels one by one; a captured graph launches them at once, for fixed shapes
and addresses. So a batch is padded to the next captured size, and what a graph depends on is its *signature*: when that no longer holds
(the cache moved, weights were replaced), the graph is captured again. A size whose capture fails runs eagerly from then on.
On CPU the graph object is the plain function; every decision here is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from serving.graph_buckets import GraphBuckets

Run = Callable[[], Tensor]
#: Records what a function launches; the result launches it again and returns the same output tensor.
Capture = Callable[[Run], Run]


class StepPath(NamedTuple):
    """How a step runs: ``graph`` or ``eager``, the rows it computes, and how many of them are padding."""

    kind: str
    rows: int
    padding: int


@dataclass(slots=True)
class GraphStats:
    """Counts since the start: graphs captured for the first time, captured again because their signature changed, replays, eager steps, failed captures."""

    captured: int = 0
    recaptured: int = 0
    replayed: int = 0
    eager: int = 0
    failed: int = 0


class DecodeGraphs:
    """Graphs by bucket over one function ``run(rows)`` that works on static buffers.

    ``sizes`` are the batch sizes to capture; the choice among them is ``serving.graph_buckets``, which the simulator prices steps by.
    ``signature(rows)`` names everything a graph of that size depends on; ``capture`` makes the graph object.
    """

    def __init__(self, sizes: Iterable[int], run: Callable[[int], Tensor], signature: Callable[[int], Hashable], capture: Capture) -> None:
        self.buckets = GraphBuckets(sizes, "engine.graphs.sizes")
        self.stats = GraphStats()
        self._run = run
        self._signature = signature
        self._capture = capture
        self._graphs: dict[int, tuple[Hashable, Run]] = {}
        self.failures: dict[int, str] = {}

    def path(self, decodes: int, chunks: int) -> StepPath:
        """Return how a batch of ``decodes`` one-token sequences and ``chunks`` prefill chunks runs; graphs hold decodes only."""
        rows, kind = self.buckets.path(decodes)
        if chunks or kind == "eager" or rows in self.failures:
            return StepPath("eager", decodes, 0)
        return StepPath("graph", rows, rows - decodes)

    def capture_all(self) -> None:
        """Capture every bucket, the largest first, so that the smaller ones find their memory in the shared pool."""
        for rows in reversed(self.buckets.sizes):
            if rows not in self.failures:
                self._ready(rows)

    def replay(self, rows: int) -> Tensor:
        """Run the bucket ``rows`` and return its output; captures first if there is no graph with today's signature.

        A failed capture is remembered in ``failures`` and the bucket's function runs eagerly instead, now and later.
        """
        graph = self._ready(rows)
        if graph is None:
            self.stats.eager += 1
            return self._run(rows)
        self.stats.replayed += 1
        return graph()

    def _ready(self, rows: int) -> Run | None:
        signature = self._signature(rows)
        held = self._graphs.get(rows)
        if held is not None and held[0] == signature:
            return held[1]
        self._graphs.pop(rows, None)  # free its memory before the new capture
        try:
            graph = self._capture(lambda: self._run(rows))
        except RuntimeError as error:
            self.failures[rows] = str(error)
            self.stats.failed += 1
            return None
        if held is None:
            self.stats.captured += 1
        else:
            self.stats.recaptured += 1
        self._graphs[rows] = (signature, graph)
        return graph


def plain_capture(run: Run) -> Run:
    """The CPU's graph object: the function itself."""
    return run


def cuda_capture(device: torch.device) -> Capture:
    """Return a capture function whose graphs share one memory pool of ``device``.

    Two warm-up runs on a side stream compile kernels and let libraries allocate their workspaces, which a capture must not see.
    """
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream(device)

    def capture(run: Run) -> Run:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay

    return capture
