"""Ranks of a tensor-parallel engine as processes on the CPU, joined by gloo: rank 0 schedules, the others do what it does.

Before each step rank 0 sends the step's inputs to all; every rank then runs the whole step, meets the others in two all-reduces a layer, and
samples the same tokens, so nothing comes back. The scheduler knows nothing of it: its plans are those of one device.
"""

from __future__ import annotations

import datetime
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engine.architecture import Architecture
from engine.loader import load, random_weights
from engine.model import DecoderWeights
from engine.runner import InFlight, Runner, RunnerOptions
from engine.step import StepInput, StepOutput
from engine.tensor_parallel import local_shape, shard

PATIENCE = datetime.timedelta(seconds=120)  # for another rank: it may still be loading


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a rank comes by the weights: a folder, or a shape and a seed."""

    shape: Architecture
    dtype: torch.dtype
    seed: int
    folder: Path | None = None

    def make(self) -> DecoderWeights:
        """All weights, on the CPU."""
        if self.folder is not None:
            return load(self.folder, device=torch.device("cpu"), dtype=self.dtype).weights
        return random_weights(self.shape, self.seed, device=torch.device("cpu"), dtype=self.dtype)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def _join(store: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=PATIENCE)


def _follow(store: str, rank: int, size: int, recipe: Recipe, options: RunnerOptions) -> None:
    """The life of a rank other than 0: run every step that rank 0 sends, until it sends None."""
    torch.set_num_threads(1)
    _join(store, rank, size)
    runner = _runner(recipe, recipe.make(), options, rank, size)
    while True:
        sent: list[Any] = [None]
        dist.broadcast_object_list(sent, src=0)
        if sent[0] is None:
            break
        runner.execute(sent[0])
    dist.destroy_process_group()


def _runner(recipe: Recipe, weights: DecoderWeights, options: RunnerOptions, rank: int, size: int) -> Runner:
    return Runner(local_shape(recipe.shape, size), shard(recipe.shape, weights, rank, size), options, reduce=_reduced)


class RankedRunner:
    """Rank 0, as a runner. ``close`` lets the other ranks go; they also end with this process."""

    def __init__(self, recipe: Recipe, weights: DecoderWeights, options: RunnerOptions, size: int) -> None:
        """Start ``size - 1`` processes. Raises InputError for a network that cannot be split, before any starts."""
        local_shape(recipe.shape, size)
        self.options = options
        self._folder = tempfile.TemporaryDirectory(prefix="twinserve-ranks-")
        store = str(Path(self._folder.name) / "store")
        context = mp.get_context("spawn")
        self._processes = [context.Process(target=_follow, args=(store, rank, size, recipe, options), daemon=True) for rank in range(1, size)]
        for process in self._processes:
            process.start()
        _join(store, 0, size)
        self.runner = _runner(recipe, weights, options, 0, size)

    def launch(self, batch: StepInput) -> InFlight:
        """Send the step to all ranks and issue it here."""
        dist.broadcast_object_list([batch], src=0)
        return self.runner.launch(batch)

    def collect(self, step: InFlight) -> StepOutput:
        """As ``Runner.collect``."""
        return self.runner.collect(step)

    def execute(self, batch: StepInput) -> StepOutput:
        """As ``Runner.execute``."""
        return self.collect(self.launch(batch))

    def warm_up(self) -> None:
        """Nothing is captured on the CPU."""

    def close(self) -> None:
        """End the other ranks."""
        dist.broadcast_object_list([None], src=0)
        for process in self._processes:
            process.join()
        dist.destroy_process_group()
        self._folder.cleanup()
