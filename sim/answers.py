"""What the simulator answers over HTTP: texts of the lengths that the scenario draws, and tokens counted without a vocabulary."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from serving.rng import stream
from serving.scenario import Scenario
from serving.scenario.workload import RequestClass
from serving.workload.classes import DEFAULT
from serving.workload.lengths import one_by_one, tokens

PIECE = 4  # characters of a word that count as a token


class AnswerLengths:
    """True lengths of answers, drawn from the scenario's distribution for the class with the request's priority."""

    def __init__(self, scenario: Scenario) -> None:
        workload = scenario.workload
        self._classes = workload.classes or (DEFAULT,)
        specs = {row.name: row.output_tokens or workload.output_tokens for row in self._classes}
        self._draws = {
            name: one_by_one(tokens(spec, stream(scenario.seed, f"serve.output_tokens.{name}"))) for name, spec in specs.items() if spec
        }

    def class_of(self, priority: int) -> RequestClass:
        """The first class with this priority, else the first of all."""
        return next((row for row in self._classes if row.priority == priority), self._classes[0])

    def draw(self, name: str, otherwise: int) -> int:
        """The next length of class ``name``; ``otherwise`` where the scenario has no distribution of its own (traces, joint tables)."""
        draw = self._draws.get(name)
        return next(draw) if draw is not None else otherwise


class PieceTokenizer:
    """Counts tokens without a vocabulary: every four characters of a word are one, named by their checksum so that equal text is equal."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``."""
        return [zlib.crc32(word[at : at + PIECE].encode()) % self.vocab for word in text.split() for at in range(0, len(word), PIECE)]

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of all messages, one more for each role and one for the answer's beginning."""
        named = [piece for role, text in messages for piece in (zlib.crc32(role.encode()) % self.vocab, *self.encode(text))]
        return [*named, zlib.crc32(b"assistant") % self.vocab]

    def decoder(self) -> PieceTokenizer:
        """Answers have no content: it is its own decoder."""
        return self

    def push(self, token: int) -> str:
        """A word."""
        return " token"

    def flush(self) -> str:
        """Nothing is ever left."""
        return ""
