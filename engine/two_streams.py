"""A step's decodes and its prompts beside each other: two streams of one GPU, by two ways through one network.

    compute stream   [decodes: by graph or eagerly]──────────┐
    second stream    └──[prompts: eagerly]───────────────────┴─ the next step

Both write to one KV cache, each the pages of its own sequences; what they share was written by earlier steps. Decodes are issued first: a graph is one
launch, and a prompt's kernels are many. On a CPU the two parts run one after the other; plans and tokens are the same.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from engine.graphs import StepPath
from engine.runner import InFlight, Runner
from engine.step import StepInput, StepOutput, StepTimes
from engine.trials import run_one_by_one

NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0)


class Side(NamedTuple):
    """A launched step of two parts; ``prompts`` is a result already where they had to be tried one by one."""

    decodes: InFlight
    prompts: InFlight | StepOutput
    batch: StepInput


class TwoStreams:
    """A runner that executes ``StepInput.beside``; steps without it run as on the plain one."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.options = runner.options
        self.device = runner.device
        self._prompts = runner.beside()
        self._second = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None

    def execute(self, batch: StepInput) -> StepOutput:
        """Run one step to its end."""
        return self.collect(self.launch(batch))

    def warm_up(self) -> None:
        """As ``Runner.warm_up``."""
        self.runner.warm_up()

    def launch(self, batch: StepInput) -> InFlight | Side:
        """Issue a step. Raises what the decodes raise: then nothing of the prompts was issued."""
        if batch.beside is None:
            return self.runner.launch(batch)
        if batch.released or batch.moves or batch.adapters:  # before either part
            self.runner.launch(StepInput((), batch.released, batch.moves, batch.adapters))
        before = self._mark()
        decodes = self.runner.launch(StepInput(batch.sequences[: batch.beside]))
        prompts = StepInput(batch.sequences[batch.beside :])
        with self._on_second(before):
            try:
                return Side(decodes, self._prompts.launch(prompts), prompts)
            except Exception as error:  # the decodes have sampled: they must not run again
                return Side(decodes, self._one_by_one(prompts, error), prompts)

    def collect(self, step: InFlight | Side) -> StepOutput:
        """Wait for the tokens of both parts."""
        if isinstance(step, InFlight):
            return self.runner.collect(step)
        decodes = self.runner.collect(step.decodes)
        prompts = step.prompts
        if isinstance(prompts, InFlight):
            try:
                prompts = self._prompts.collect(prompts)
            except Exception as error:
                prompts = self._one_by_one(step.batch, error)
        return _together(step, decodes, prompts)

    def _one_by_one(self, prompts: StepInput, error: Exception) -> StepOutput:
        try:
            return run_one_by_one(self._prompts, prompts, error)
        except Exception as last:  # none could be executed: the next step will tell whether it is the device
            reason = f"its step failed: {type(last).__name__}: {last}"
            return StepOutput({}, StepPath("eager", 0, 0), NO_TIMES, {sequence.request_id: reason for sequence in prompts.sequences})

    def _mark(self) -> torch.cuda.Event | None:
        if self._second is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @contextlib.contextmanager
    def _on_second(self, before: torch.cuda.Event | None):
        """What is issued within runs on the second stream, after ``before``; whatever comes after waits for it."""
        if self._second is None:
            yield
            return
        compute = torch.cuda.current_stream(self.device)
        self._second.wait_event(before)
        try:
            with torch.cuda.stream(self._second):
                yield
        finally:
            compute.wait_stream(self._second)


def _together(step: Side, decodes: StepOutput, prompts: StepOutput) -> StepOutput:
    """One output of both parts; the path is that of the decodes. On CUDA the device's time is from the first begin to the last end; on CPU their sum."""
    ours, theirs = decodes.times, prompts.times
    device_s = ours.device_s + theirs.device_s
    if step.decodes.events and isinstance(step.prompts, InFlight):
        begin = step.decodes.events[0]
        device_s = max(ours.device_s, begin.elapsed_time(step.prompts.events[1]) / 1000)
    times = StepTimes(ours.prepare_s + theirs.prepare_s, ours.launch_s + theirs.launch_s, ours.sample_s + theirs.sample_s, ours.post_s + theirs.post_s, device_s)
    rows = decodes.path.rows + (0 if decodes.path.kind == "graph" else prompts.path.rows)
    path = StepPath(decodes.path.kind, rows, decodes.path.padding)
    entropy = decodes.entropy | prompts.entropy
    return StepOutput(decodes.tokens | prompts.tokens, path, times, decodes.errors | prompts.errors, decodes.probabilities | prompts.probabilities, entropy)
