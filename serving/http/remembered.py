"""Prompts that come again are not cut into tokens again: the first stage of a request, remembered as the simulator's stages are (system B3)."""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence

from serving.http.backend import Decoder, Tokenizer
from serving.policies.protocols import Branch
from serving.ttl_lru import TtlLru

TOKEN_BYTES = 4


class RememberedTokens:
    """A tokenizer before which a cache stands (``serving.http.backend.Tokenizer``); ``branch`` decides whether it is looked at.

    The key is the text itself, so nobody gets the tokens of another prompt.
    """

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: float, branch: Branch, clock: Callable[[], float] = time.monotonic) -> None:
        self.vocab = tokenizer.vocab
        self.cache = TtlLru(capacity_bytes)
        self._tokenizer, self._branch, self._clock = tokenizer, branch, clock

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        return self._through(text, text, lambda: self._tokenizer.encode(text))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation, all of it together."""
        key = tuple(messages)
        return self._through(key, "".join(map("".join, key)), lambda: self._tokenizer.chat(messages))

    def decoder(self) -> Decoder:
        """The tokenizer's own: an answer comes once."""
        return self._tokenizer.decoder()

    def _through(self, key: str | tuple, text: str, cut: Callable[[], list[int]]) -> list[int]:
        begun_s, raw = self._clock(), text.encode("utf-8", "surrogatepass")
        short, looked_s, found = zlib.crc32(raw), None, None
        if self._branch.cached(short):
            found = self.cache.get(key, begun_s)
            looked_s = self._clock() - begun_s
        if found is not None:
            self._branch.observe(short, True, looked_s)
            return found.tolist()
        tokens = cut()
        there = self.cache.put(key, array("q" if self.vocab > 2**31 else "i", tokens), len(raw) + TOKEN_BYTES * len(tokens), self._clock())
        self._branch.observe(short, there, looked_s)
        return tokens
