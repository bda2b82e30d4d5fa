"""How an answer is worded: whole, or as server-sent events."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

DONE = b"data: [DONE]\n\n"


class Answer:
    """Words one answer for one of the two endpoints. What events share is encoded once."""

    def __init__(self, number: int, llm: str, created: int, *, chat: bool, null_usage: bool) -> None:
        """``null_usage``: events say that the usage comes at the end."""
        self._chat = chat
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{number}", "object": "", "created": created, "model": llm}
        self._usage = {"usage": None} if null_usage else {}
        slot = "\0"  # takes the place of what differs from event to event; json writes it as \u0000
        content = {"delta": {"content": slot}} if chat else {"text": slot}
        text = json.dumps(self._event({"index": 0, **content, "logprobs": None, "finish_reason": slot}), separators=(",", ":"))
        self._before, self._between, self._after = text.split('"\\u0000"')

    def _event(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(choices), **self._usage}

    def opening(self) -> bytes:
        """What comes before the first token."""
        if not self._chat:
            return b""
        return encoded(self._event({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}))

    def event(self, piece: str, finish: str | None = None) -> bytes:
        """One token, or the end."""
        reason = "null" if finish is None else quoted(finish)
        return f"data: {self._before}{quoted(piece)}{self._between}{reason}{self._after}\n\n".encode()

    def usage_event(self, prompt: int, completion: int) -> bytes:
        """The counts, on their own at the end of a stream."""
        return encoded(self._event() | {"usage": usage(prompt, completion)})

    def whole(self, text: str, finish: str, prompt: int, completion: int) -> dict[str, Any]:
        """An answer in one piece."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(prompt, completion)}


def encoded(value: dict[str, Any]) -> bytes:
    """``value`` as an event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
