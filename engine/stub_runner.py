"""A runner that computes nothing: it keeps what a KV cache would hold, checks what each step reads, and takes the time it is told.

With it the engine's loop serves random workloads thousands of times faster than any network could, while every block table, every chunk and
every token that the loop hands over is held against what the cache really contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from zlib import crc32

from engine.graphs import StepPath
from engine.step import LAST_SAMPLED, SequenceInput, StepInput, StepOutput, StepTimes


class StubRunner:
    """``duration_s(batch)`` is what a step takes; ``fault(sequence)`` may return why a sequence fails, or raise.

    The token that follows a text depends on all of it, as in a network, and on the adapter that read each token: a wrong block anywhere in a context
    or a wrong slot changes what comes next.
    """

    def __init__(
        self, block_tokens: int, duration_s: Callable[[StepInput], float], *, vocab: int = 1009, check: bool = True,
        fault: Callable[[SequenceInput], str | None] | None = None,
    ) -> None:  # fmt: skip
        self.steps = 0
        self._width = block_tokens
        self._duration_s = duration_s
        self._vocab = vocab
        self._check = check
        self._fault = fault
        self._blocks: dict[int, list[int]] = {}  # block -> digest of the text up to and including each of its tokens
        self._host: dict[object, list[int]] = {}  # pages copied out
        self._slots: dict[int, str] = {}  # adapters
        self._last: dict[int, int] = {}
        self._context: dict[int, list[int]] = {}  # request -> digest at the end of each full block that it has read so far

    def execute(self, batch: StepInput) -> StepOutput:
        """Run one step to its end."""
        return self.collect(self.launch(batch))

    def launch(self, batch: StepInput) -> tuple:
        """Write the step's tokens; raises AssertionError for a table or a position that contradicts the cache."""
        self.steps += 1
        for request_id in batch.released:
            self._context.pop(request_id, None)
        for kind, key, block in batch.moves:
            self._move(kind, key, block)
        self._slots.update(batch.adapters)
        if batch.beside is not None and self._check:
            self._check_apart(batch.sequences[: batch.beside], batch.sequences[batch.beside :])
        tokens: dict[int, tuple[int, ...]] = {}
        found = {sequence.request_id: self._fault(sequence) for sequence in batch.sequences} if self._fault is not None else {}
        errors = {request_id: reason for request_id, reason in found.items() if reason is not None}  # a raise leaves nothing half done
        for sequence in batch.sequences:
            if sequence.request_id in errors:
                continue
            digests = self._write(sequence) if self._check else range(sequence.start, sequence.start + len(sequence.tokens))
            if sequence.sampled_rows:
                sampled = tuple(digest % self._vocab for digest in digests[-sequence.sampled_rows :])
                self._last[sequence.request_id] = sampled[-1]
                tokens[sequence.request_id] = sampled
        return batch, tokens, errors

    def _check_apart(self, *parts: Sequence[SequenceInput]) -> None:
        """Parts that run side by side: neither may touch a page that the other writes."""
        written = [{block for one in part for block in one.block_table[one.start // self._width :]} for part in parts]
        read = [{block for one in part for block in one.block_table} for part in parts]
        assert not written[0] & read[1] and not written[1] & read[0], "two streams meet in a page"

    def _move(self, kind: str, key: object, block: int) -> None:
        if kind == "out":
            self._host[key] = list(self._blocks[block])
            assert len(self._host[key]) == self._width, "a page that is not full was copied out"
        elif kind == "in":
            self._blocks[block] = list(self._host[key])
        else:
            del self._host[key]

    def collect(self, step: tuple) -> StepOutput:
        """Return the tokens of a launched step."""
        batch, tokens, errors = step
        times = StepTimes(0.0, 0.0, 0.0, 0.0, self._duration_s(batch))
        return StepOutput(tokens, StepPath("eager", sum(len(sequence.tokens) for sequence in batch.sequences), 0), times, errors)

    def _write(self, sequence: SequenceInput) -> list[int]:
        """Put the new tokens behind those in the cache; returns the digest of the text up to each."""
        table, width, start = sequence.block_table, self._width, sequence.start
        end = start + len(sequence.tokens)
        assert len(table) == -(-end // width), f"request {sequence.request_id}: {len(table)} blocks for {end} tokens"
        assert 0 not in table, f"request {sequence.request_id}: block 0 is reserved"
        context = self._context.setdefault(sequence.request_id, [])
        found = [self._digest(sequence.request_id, table, (index + 1) * width - 1) for index in range(start // width)]
        assert found[: len(context)] == context, f"request {sequence.request_id}: somebody wrote into its blocks"
        context[:] = found
        digest = self._digest(sequence.request_id, table, start - 1) if start else 0
        own = crc32(self._slots[sequence.adapter].encode()) if sequence.adapter >= 0 else 0
        digests = []
        for position, token in enumerate(sequence.tokens, start):
            value = self._last[sequence.request_id] if token == LAST_SAMPLED else token
            digest = (digest * 1_000_003 + value + 1 + own) & 0xFFFFFFFFFFFF
            block = self._blocks.setdefault(table[position // width], [])
            del block[position % width :]
            assert len(block) == position % width, f"request {sequence.request_id}: position {position} leaves a hole in its block"
            block.append(digest)
            digests.append(digest)
        return digests

    def _digest(self, request_id: int, table: list[int], position: int) -> int:
        """The digest that the cache holds at ``position``."""
        held = self._blocks.get(table[position // self._width], [])
        offset = position % self._width
        assert len(held) > offset, f"request {request_id}: position {position} was never written"
        return held[offset]
