"""The runner's seam: what one step must compute and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.graphs import StepPath
from engine.sampling import GREEDY, SamplingParams
from serving.kv_tiers import Move

#: As a token to process: the one that the previous step sampled for this request, which the host may not have seen yet.
LAST_SAMPLED = -1


class SequenceInput(NamedTuple):
    """One sequence's part of a step. A NamedTuple because hundreds are made each step.

    ``tokens`` are processed now, at positions ``start``, ``start + 1``...; ``start`` tokens are in the cache already, less the ``dropped`` ones
    (whole blocks, which its table lists no more; keys are rotated by their positions, so those that are left need not know). ``block_table`` lists the
    sequence's blocks in order and covers the new tokens. ``sampled_rows`` counts the last positions whose next token is sampled: 0 for a
    chunk that does not complete the prompt, 1 normally, k + 1 to verify k drafted tokens: those behind the first. ``drafted`` [k, vocab] holds
    the probabilities that they were drawn from, where they were: each row's token is then the draft as often as rejection sampling accepts it.
    ``adapter`` is the slot of the sequence's LoRA adapter, -1: none.
    """

    request_id: int
    tokens: Sequence[int]
    start: int
    block_table: list[int]
    sampled_rows: int = 1
    sampling: SamplingParams = GREEDY
    dropped: int = 0
    drafted: Tensor | None = None
    adapter: int = -1


@dataclass(frozen=True, slots=True)
class StepInput:
    """All sequences of a step, in any order, each request at most once.

    ``released`` names requests that gave their blocks up since the last step (finished, aborted, preempted). ``moves`` are made first: pages
    copied out to host memory before others are written to their blocks, and in before they are read. ``adapters`` are copied into slots first, by name.
    ``beside``: the sequences from this one on are prompts that run on a second stream of the device; None: one stream does all.
    """

    sequences: Sequence[SequenceInput]
    released: Sequence[int] = ()
    moves: Sequence[Move] = ()
    adapters: Sequence[tuple[int, str]] = ()
    beside: int | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went, seconds. ``device_s`` runs beside the host's parts on CUDA; on CPU it is the forward pass.

    prepare: build and send the inputs; launch: issue the forward pass (0 on CPU, where it *is* the device time); sample: issue
    processors and sampling; post: from the tokens' arrival to the result.
    """

    prepare_s: float
    launch_s: float
    sample_s: float
    post_s: float
    device_s: float


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens of each request (``sampled_rows`` of them), and the requests that failed alone, each with its reason."""

    tokens: dict[int, tuple[int, ...]]
    path: StepPath
    times: StepTimes
    errors: dict[int, str] = field(default_factory=dict)
    probabilities: dict[int, Tensor] = field(default_factory=dict)  # each request's last row was drawn from; only of a network that drafts
    entropy: dict[int, float] = field(default_factory=dict)  # of the attention of each request's last row, over its maximum; only with a trace
