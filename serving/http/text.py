"""An answer's text as its tokens come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from serving.http.backend import Decoder


class Text:
    """Pieces of an answer, one a token. What might be the beginning of a stop string is held back until it is clear that it is none."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self.stopped = False
        self.count = 0  # tokens that belong to the answer
        self._decoder = decoder
        self._stops = tuple(stops)
        self._held = ""

    def push(self, tokens: list[int]) -> list[str]:
        """The text that each token completes; tokens behind a stop string are left out."""
        if not self._stops:
            self.count += len(tokens)
            return [self._decoder.push(token) for token in tokens]
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            self.count += 1
            pieces.append(self._release(self._held + self._decoder.push(token)))
        return pieces

    def finish(self) -> str:
        """What is left when the last token has come."""
        if self.stopped:
            return ""
        rest = self._held + self._decoder.flush()
        self._held = ""
        return self._release(rest, last=True) if self._stops else rest

    def _release(self, text: str, *, last: bool = False) -> str:
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = 0 if last else max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
