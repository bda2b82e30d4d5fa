"""Drafts of a smaller network, one token after the other, on KV pages of its own under the block tables of the network that verifies them.

A text is read when its first draft is asked for, prompt and all, whatever the prefix cache held of it; from then on only what is new. Pages need
no manager of their own: a page's number means the same place in both caches, and equal texts write equal pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.drafting import NOTHING, Ask, Draft
from engine.runner import Runner
from engine.step import LAST_SAMPLED, SequenceInput, StepInput, StepOutput


class DraftNetwork:
    """Proposes what ``runner``, whose options say that it drafts, samples by the request's own parameters (its logits processors left out)."""

    def __init__(self, runner: Runner) -> None:
        runner.tables.release_all()  # of a loop that failed
        self.runner = runner
        self._read: dict[int, tuple[int, Sequence[int]]] = {}  # tokens of its text that were read, and the drafts behind them
        self._released: list[int] = []

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Read what is new, then draft as many tokens as anybody wants; a step a token."""
        outputs = [self._read_on(asks)]
        steps = []
        for drafted in range(1, max(ask.count for ask in asks)):
            batch = [
                SequenceInput(ask.request_id, (LAST_SAMPLED,), len(ask.tokens) + drafted - 1, ask.table, 1, ask.sampling) for ask in asks if ask.count > drafted
            ]
            steps.append(self.runner.launch(StepInput(batch)))
        outputs += [self.runner.collect(step) for step in steps]
        return [self._draft(ask, outputs) for ask in asks]

    def release(self, request_id: int) -> None:
        """What was read of it is lost with its pages."""
        if self._read.pop(request_id, None) is not None:
            self._released.append(request_id)

    def _read_on(self, asks: Sequence[Ask]) -> StepOutput:
        """Read the texts to their ends, in steps as large as the runner takes; returns the first drafts."""
        tokens: dict[int, tuple[int, ...]] = {}
        probabilities: dict[int, torch.Tensor] = {}
        room, batch = self.runner.options.max_batch_tokens, []

        def flush() -> StepOutput:
            output = self.runner.execute(StepInput(batch, tuple(self._released)))
            self._released.clear()
            tokens.update(output.tokens)
            probabilities.update(output.probabilities)
            return output

        for ask in asks:
            start = self._known(ask)
            while start < len(ask.tokens):
                end = min(len(ask.tokens), start + room)
                batch.append(SequenceInput(ask.request_id, ask.tokens[start:end], start, ask.table, int(end == len(ask.tokens)), ask.sampling))
                room -= end - start
                start = end
                if not room:
                    flush()
                    room, batch = self.runner.options.max_batch_tokens, []
        last = flush()
        return StepOutput(tokens, last.path, last.times, last.errors, probabilities)

    def _known(self, ask: Ask) -> int:
        """Tokens of the text whose keys and values are there: those read before, and the drafts that came true (of the last one none were made)."""
        known, drafts = self._read.get(ask.request_id, (0, ()))
        for draft in drafts[:-1]:
            if known >= len(ask.tokens) - 1 or ask.tokens[known] != draft:
                break
            known += 1
        return known

    def _draft(self, ask: Ask, outputs: Sequence[StepOutput]) -> Draft:
        rows = [output.tokens.get(ask.request_id) for output in outputs[: ask.count]]
        drafts = [row[0] for row in rows if row is not None]
        if len(drafts) < len(rows):  # its numbers are not finite
            self._read[ask.request_id] = (0, ())
            return NOTHING
        self._read[ask.request_id] = (len(ask.tokens), drafts)
        if ask.sampling.temperature == 0:
            return Draft(drafts)
        return Draft(drafts, torch.stack([output.probabilities[ask.request_id] for output in outputs[: ask.count]]))
