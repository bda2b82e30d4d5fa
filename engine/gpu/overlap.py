"""Decodes and a prompt on two streams of the device: how much of the shorter part the longer one hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.architecture import Architecture
from engine.gpu.steps import BLOCK_TOKENS, SPARE, decode_step, time_steps
from engine.kv_cache import block_bytes, free_bytes
from engine.model import DecoderWeights
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from engine.two_streams import TwoStreams
from serving.memory import blocks_for


def overlaps(shape: Architecture, weights: DecoderWeights, cases: Sequence[tuple[int, int, int]], *, repeats: int) -> Iterator[dict[str, Any]]:
    """For each (decodes, their context, tokens of a prompt) that memory allows: seconds of each part alone, of both in one batch, and of both beside each other.

    ``lost`` is the share of the possible overlap that is lost, 0: the step takes as long as its longer part, 1: as both in turn. It is
    ``latency.stream_contention`` where neither compute nor bandwidth of the parts add up to more than the longer one takes.
    """
    device, dtype = weights.embedding.device, weights.embedding.dtype
    for batch, context, prompt in cases:
        each, whole = blocks_for(context + 1, BLOCK_TOKENS), blocks_for(prompt, BLOCK_TOKENS)
        blocks = 1 + batch * each + whole
        if blocks * block_bytes(shape, BLOCK_TOKENS, dtype) > SPARE * free_bytes(device):
            continue
        options = RunnerOptions(
            blocks=blocks, block_tokens=BLOCK_TOKENS, max_seqs=batch + 1, max_batch_tokens=batch + prompt, max_model_len=max(context + BLOCK_TOKENS, prompt),
            graph_sizes=(batch,),
        )  # fmt: skip
        runner = TwoStreams(Runner(shape, weights, options))
        runner.warm_up()
        decodes = decode_step(batch, context).sequences
        chunk = SequenceInput(batch, [11] * prompt, 0, list(range(1 + batch * each, blocks)))
        parts = {"decodes_s": StepInput(decodes), "prompt_s": StepInput([chunk]), "together_s": StepInput([*decodes, chunk]),
                 "beside_s": StepInput([*decodes, chunk], beside=batch)}  # fmt: skip
        found = {name: time_steps(runner, step, repeats)[0] for name, step in parts.items()}
        longer, shorter = max(found["decodes_s"], found["prompt_s"]), min(found["decodes_s"], found["prompt_s"])
        yield {"batch": batch, "context": context, "prompt": prompt, **found, "lost": (found["beside_s"] - longer) / shorter}
