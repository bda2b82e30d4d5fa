"""The engine's decode steps by captured graph and eagerly, beside the time that reading weights and KV pages takes at the copy's rate."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from engine.architecture import Architecture
from engine.kv_cache import block_bytes, free_bytes
from engine.model import DecoderWeights
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.two_streams import TwoStreams
from serving.memory import blocks_for

BLOCK_TOKENS = 16
SPARE = 0.85  # part of the free memory that the pages may take


def decode_step(batch: int, context: int) -> StepInput:
    """``batch`` decodes, each with ``context`` tokens cached, on blocks of their own."""
    each = blocks_for(context + 1, BLOCK_TOKENS)
    return StepInput([SequenceInput(one, (7,), context, list(range(1 + one * each, 1 + (one + 1) * each))) for one in range(batch)])


def floor_s(shape: Architecture, batch: int, context: int, itemsize: int, bytes_per_s: float) -> float:
    """Seconds to read every weight a decode step needs (of the embedding only a row per sequence) and the keys and values of its contexts."""
    embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
    read = (shape.parameters() - embedding) * itemsize + batch * context * shape.kv_bytes_per_token(itemsize)
    return read / bytes_per_s


def decode_steps(
    shape: Architecture, weights: DecoderWeights, cases: Sequence[tuple[int, int]], bytes_per_s: float, *, repeats: int
) -> Iterator[dict[str, Any]]:
    """Seconds of whole steps (the host's part included) and of the device alone, for each (batch, context) that memory allows, by both paths."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    fitting = [case for case in cases if case[0] * blocks_for(case[1] + 1, BLOCK_TOKENS) * block_bytes(shape, BLOCK_TOKENS, dtype) < SPARE * free_bytes(device)]
    if not fitting:
        return
    blocks = 1 + max(batch * blocks_for(context + 1, BLOCK_TOKENS) for batch, context in fitting)
    longest, seqs = max(context for _, context in fitting) + BLOCK_TOKENS, max(batch for batch, _ in fitting)
    for path, sizes in (("graph", tuple(sorted({batch for batch, _ in fitting}))), ("eager", ())):
        options = RunnerOptions(blocks=blocks, block_tokens=BLOCK_TOKENS, max_seqs=seqs, max_batch_tokens=max(seqs, 8), max_model_len=longest, graph_sizes=sizes)
        runner = Runner(shape, weights, options)
        runner.warm_up()
        for batch, context in fitting:
            step = StepInput(decode_step(batch, context).sequences, tuple(range(seqs)))
            whole, on_device = time_steps(runner, step, repeats)
            low = floor_s(shape, batch, context, dtype.itemsize, bytes_per_s)
            yield {
                "path": path, "batch": batch, "context": context, "step_s": whole, "device_s": on_device, "floor_s": low, "of_roofline": low / whole,
                "device_of_roofline": low / on_device, "capture_failures": dict(runner.graphs.failures),
            }  # fmt: skip
        del runner
        free_memory(device)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more: a runner and its graphs refer to each other, so only the collector finds them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def time_steps(runner: Runner | TwoStreams, step: StepInput, repeats: int) -> tuple[float, float]:
    """Median seconds between successive steps, and of the device in a step."""
    again = StepInput(step.sequences, beside=step.beside)
    runner.execute(step)
    runner.execute(again)
    whole, device_s = [], []
    for _ in range(repeats):
        begin = time.perf_counter()
        output = runner.execute(again)
        whole.append(time.perf_counter() - begin)
        device_s.append(output.times.device_s)
    return statistics.median(whole), statistics.median(device_s)
