"""Small shapes and a stand-in for the scheduler: random chunks, random mixtures, scattered blocks."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from engine.architecture import Architecture
from engine.loader import random_weights
from engine.runner import Runner, RunnerOptions
from engine.sampling import GREEDY
from engine.step import SequenceInput, StepInput

CPU = torch.device("cpu")
TINY = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=61, max_model_len=128)
MOE = replace(TINY, experts=4, experts_per_token=2, expert_intermediate=24, normalise_router=True)


def runner(shape: Architecture = TINY, dtype=torch.float32, seed=3, trace=None, weights=None, **options) -> Runner:
    """A runner on random weights with room for a few sequences."""
    weights = weights or random_weights(shape, seed, device=CPU, dtype=dtype)
    sizes = {"blocks": 64, "block_tokens": 4, "max_seqs": 8, "max_batch_tokens": 128} | options
    return Runner(shape, weights, RunnerOptions(**sizes), trace)


class Blocks:
    """Hands out shuffled blocks, never block 0."""

    def __init__(self, runner: Runner, rng: random.Random) -> None:
        self.free = list(range(1, runner.cache.blocks))
        rng.shuffle(self.free)
        self.block_tokens = runner.cache.block_tokens
        self.held: dict[int, list[int]] = {}

    def cover(self, request_id: int, tokens: int) -> list[int]:
        held = self.held.setdefault(request_id, [])
        while len(held) * self.block_tokens < tokens:
            held.append(self.free.pop())
        return list(held)

    def release(self, request_id: int) -> None:
        self.free.extend(self.held.pop(request_id))


def record_logits(runner: Runner) -> list[torch.Tensor]:
    """Collect the logits of each step's sampled rows."""
    found: list[torch.Tensor] = []
    forward = runner._forward

    def recording(layout, path):
        logits = forward(layout, path)
        found.append(logits.clone())
        return logits

    runner._forward = recording
    return found


def generate(runner: Runner, prompts: dict[int, list[int]], new: int, rng: random.Random, sampling=None, preempt: float = 0.0) -> tuple[dict, dict]:
    """Serve ``prompts`` with random chunks and mixtures; return each request's tokens, and its logits by position."""
    blocks, logits = Blocks(runner, rng), record_logits(runner)
    known = {request: list(prompt) for request, prompt in prompts.items()}
    done = dict.fromkeys(prompts, 0)
    seen: dict[int, dict[int, torch.Tensor]] = {request: {} for request in prompts}
    released: list[int] = []
    while True:
        open_ones = [r for r in known if len(known[r]) < len(prompts[r]) + new]
        if not open_ones:
            return {r: tokens[len(prompts[r]) :] for r, tokens in known.items()}, seen
        entries = []
        for r in rng.sample(open_ones, rng.randint(1, len(open_ones))):
            if done[r] and rng.random() < preempt:
                blocks.release(r)
                released.append(r)
                done[r] = 0
                continue
            left = len(known[r]) - done[r]
            count = rng.randint(1, left)
            tokens = known[r][done[r] : done[r] + count]
            entries.append(SequenceInput(r, tokens, done[r], blocks.cover(r, done[r] + count), int(count == left), (sampling or {}).get(r, GREEDY)))
        if not entries:
            continue
        result = runner.execute(StepInput(entries, tuple(released)))
        released = []
        assert not result.errors
        ordered = [e for e in entries if len(e.tokens) == 1] + [e for e in entries if len(e.tokens) > 1]
        rows = iter(logits.pop())
        for e in ordered:
            done[e.request_id] += len(e.tokens)
            if e.sampled_rows:
                seen[e.request_id][done[e.request_id] - 1] = next(rows)
                known[e.request_id].extend(result.tokens[e.request_id])
            else:
                assert e.request_id not in result.tokens
