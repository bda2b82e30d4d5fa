"""A pipeline of stages: a step's sequences and chunks are cut into micro-batches that follow each other through the stages.

Micro-batch i starts on stage s when i-1 has left it and its own activations have come from stage s-1. ``flush`` ends a step when
the last micro-batch has left the last stage, so every step fills and drains the pipeline: with p equal stages and m micro-batches
(p-1)/(m+p-1) of stage time idles (Huang et al., GPipe, 2019). ``steady`` lets the next step's micro-batches follow at once, as
engines do that keep one batch in flight for each stage: a step lasts as long as the busiest stage works, or as one micro-batch
takes to come round, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hwmodels.parallel import pipeline_s
from serving.errors import InputError, nearest
from serving.graph_buckets import Path
from serving.plan import StepShape


class Pipeline:
    """Prices steps of one replica whose ``stages`` are latency models. ``send_s(tokens)`` moves activations to the next stage."""

    def __init__(self, stages: Sequence[Any], micro_batches: int, send_s: Callable[[int], float], *, steady: bool) -> None:
        self.stages = list(stages)
        self.micro_batches = micro_batches
        self._send_s = send_s
        self._steady = steady

    def step_s(self, shape: StepShape) -> float:
        """Seconds of one step."""
        if shape.chunks:
            return self._mixed_s(shape)
        return self._decode_s(shape.decodes, shape.decode_context_tokens, shape.query_tokens_per_decode)

    def run_s(self, shape: StepShape, steps: int) -> list[float]:
        """Seconds of ``steps`` successive decode steps, by the operations of ``step_s``."""
        decodes, queries = shape.decodes, shape.query_tokens_per_decode
        first = shape.decode_context_tokens
        return [self._decode_s(decodes, first + i * decodes, queries) for i in range(steps)]

    def path(self, shape: StepShape) -> tuple[int, Path]:
        """Tokens that one micro-batch executes after padding, and whether by graph or eagerly."""
        return self.stages[0].path(micro_shapes(shape, self.micro_batches)[0])

    def _decode_s(self, decodes: int, context: int, queries: int) -> float:
        """All micro-batches are as the largest one."""
        count = min(self.micro_batches, decodes) or 1
        size = -(-decodes // count)
        shape = StepShape((), size, -(-context // count), size, queries)
        stage_s = [stage.step_s(shape) for stage in self.stages]
        send_s = self._send_s(size * queries)
        if not self._steady:
            return pipeline_s(stage_s, count, send_s)
        return max(count * max(stage_s), sum(stage_s) + (len(stage_s) - 1) * send_s)

    def _mixed_s(self, shape: StepShape) -> float:
        batches = micro_shapes(shape, self.micro_batches)
        costs = [[stage.step_s(batch) for stage in self.stages] for batch in batches]
        sends = [self._send_s(tokens_of(batch)) for batch in batches]
        if not self._steady:
            return makespan_s(costs, sends)
        busiest = max(map(sum, zip(*costs)))
        return max(busiest, *(sum(row) + (len(row) - 1) * send_s for row, send_s in zip(costs, sends)))


def tokens_of(shape: StepShape) -> int:
    """Tokens that a step computes."""
    return shape.decodes * shape.query_tokens_per_decode + sum(new for new, _ in shape.chunks)


def makespan_s(costs: Sequence[Sequence[float]], sends: Sequence[float]) -> float:
    """Seconds until micro-batches of unequal cost have left the last stage. ``costs[i][s]`` is that of micro-batch i on stage s."""
    free = [0.0] * len(costs[0])
    ready = 0.0
    for row, send_s in zip(costs, sends):
        ready = 0.0
        for stage, cost_s in enumerate(row):
            ready = free[stage] = max(ready, free[stage]) + cost_s
            ready += send_s
        ready -= send_s
    return ready


def micro_shapes(shape: StepShape, count: int) -> list[StepShape]:
    """Cut a step into at most ``count`` micro-batches: decodes evenly, prompt tokens evenly and in order, chunks where need be.

    A piece of a prompt follows the one before through every stage, so its context is there when it comes.
    """
    decodes, queries = shape.decodes, shape.query_tokens_per_decode
    prompt = sum(new for new, _ in shape.chunks)
    count = max(1, min(count, decodes + prompt))
    pieces = _cut(shape.chunks, [prompt * (i + 1) // count for i in range(count)])
    shapes = []
    rows_left = shape.logits_rows - decodes
    for i, chunks in enumerate(pieces):
        own = decodes * (i + 1) // count - decodes * i // count
        context = shape.decode_context_tokens * own // decodes if decodes else 0
        rows = min(rows_left, len(chunks))
        rows_left -= rows
        if own or chunks:
            shapes.append(StepShape(tuple(chunks), own, context, own + rows, queries, streams=shape.streams))
    return shapes or [shape]


def _cut(chunks: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Chunks in order, cut where the running sum of new tokens passes each of ``ends``."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in ends]
    done, slot = 0, 0
    for new, before in chunks:
        while new:
            while ends[slot] <= done:
                slot += 1
            take = min(new, ends[slot] - done)
            pieces[slot].append((take, before))
            new, before, done = new - take, before + take, done + take
    return pieces


def check_pipeline(schedule: str, micro_batches: int | None, where: str) -> None:
    """Raise InputError for a schedule that does not exist or a count of micro-batches that cannot be."""
    if schedule not in ("steady", "flush"):
        raise InputError(f"{where}.schedule", f"there is no schedule '{schedule}'", nearest(str(schedule), ["steady", "flush"]))
    if micro_batches is not None and not (isinstance(micro_batches, int) and micro_batches >= 1):
        raise InputError(f"{where}.micro_batches", "must be a whole number of at least 1", f"got {micro_batches!r}")
