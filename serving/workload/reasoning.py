"""Turns requests into sessions of hidden rounds and an answer, which share their prefix."""

from __future__ import annotations

from collections.abc import Iterator

from serving.request import Arrival, Request
from serving.scenario.reasoning import Reasoning
from serving.workload.context import Context
from serving.workload.lengths import one_by_one, tokens
from serving.workload.sessions import Session, Turn

HIDDEN = "reasoning"  # the class of hidden rounds in metrics and records


def reasoning_sessions(arrivals: Iterator[Arrival], spec: Reasoning, context: Context) -> Iterator[Session]:
    """Yield a session for each arrival. Ids are counted anew; the answer is counted from the arrival, thinking included."""
    maker = _Maker(spec, context)
    return map(maker.session, arrivals)


class _Maker:
    def __init__(self, spec: Reasoning, context: Context) -> None:
        self._spec = spec
        self._context = context
        self._rng = context.rng("reasoning")
        self._rounds = one_by_one(tokens(spec.rounds, context.rng("reasoning.rounds")))
        self._tokens = one_by_one(tokens(spec.tokens, context.rng("reasoning.tokens")))
        self._verify = one_by_one(tokens(spec.verify_tokens, context.rng("reasoning.verify")))
        self._requests = 0
        self._sessions = 0

    def session(self, arrival: Arrival) -> Session:
        """The rounds of one request, then its answer; rounds that find no room in the longest sequence are left out."""
        request = arrival.request
        turns: list[Turn] = []
        history, keys = request.prompt_tokens, request.prefix_hashes
        room = self._context.max_model_len - arrival.output_tokens - 1
        reasons = self._rng.random() < self._spec.share
        for _ in range(next(self._rounds) if reasons else 0):
            for attempt in range(self._spec.branches):
                thought, asked = next(self._tokens), next(self._verify)
                if history + asked + thought > room:
                    break
                prompt = history + asked
                own = (self._sessions, len(turns))
                turn = self._turn(request, prompt, thought, self._keys(keys, prompt, ("asked", *own)), own)
                turns.append(turn)
                kept = attempt + 1 == self._spec.branches or self._rng.random() < self._spec.acceptance
                if kept:
                    keys = self._with_generated(turn.arrival.request, prompt + thought)
                    history = prompt + thought
                    break
        turns.append(self._answer(arrival, history, keys))
        self._sessions += 1
        return Session(request.arrival_s, tuple(turns))

    def _turn(self, request: Request, prompt: int, thought: int, keys: tuple, own: tuple[int, int]) -> Turn:
        hidden = request._replace(
            request_id=self._requests, prompt_tokens=prompt, max_output_tokens=thought, class_name=HIDDEN, session=self._sessions,
            prefix_hashes=keys, generated_hash_seed=("thought", *own) if self._context.prefix_caching else None, ttft_slo_s=float("inf"),
        )  # fmt: skip
        self._requests += 1
        return Turn(Arrival(hidden, thought), 0.0)

    def _answer(self, arrival: Arrival, history: int, keys: tuple) -> Turn:
        request = arrival.request._replace(request_id=self._requests, prompt_tokens=history, prefix_hashes=keys, session=self._sessions)
        self._requests += 1
        return Turn(Arrival(request, arrival.output_tokens), 0.0, from_start=True)

    def _keys(self, known: tuple, prompt: int, own: tuple) -> tuple:
        """Keys of a prompt's full blocks: those known, then those of what is asked."""
        if not self._context.prefix_caching:
            return ()
        blocks = prompt // self._context.block_tokens
        return (*known, *((own, block) for block in range(len(known), blocks)))

    def _with_generated(self, request: Request, history: int) -> tuple:
        if not self._context.prefix_caching:
            return ()
        keys = request.prefix_hashes
        return (*keys, *((request.generated_hash_seed, block) for block in range(len(keys), history // self._context.block_tokens)))
