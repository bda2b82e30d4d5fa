"""A backend that generates what a test tells it to, when the test tells it to."""

from __future__ import annotations

from serving.http.backend import Departure, Generation, ReplicaState
from serving.http.delivery import Streams, TokenStream
from serving.http.telemetry import Telemetry


class Letters:
    """A token is a code point."""

    vocab = 0x110000

    def encode(self, text):
        return [ord(letter) for letter in text]

    def chat(self, messages):
        return self.encode("".join(f"{role}:{text}|" for role, text in messages))

    def decoder(self):
        return self

    def push(self, token):
        return chr(token)

    def flush(self):
        return ""


class Scripted:
    """``say`` and ``end`` drive what was asked; ``script`` answers a request at once when it arrives."""

    llm = "scripted"
    adapters = ("tuned",)
    max_model_len = 64

    def __init__(self, script: str | None = None, refuse: str | None = None) -> None:
        self.tokenizer = Letters()
        self.streams = Streams(Telemetry(self.llm))
        self.asked: dict[int, Generation] = {}
        self.aborted: list[int] = []
        self.started = self.closed = False
        self.broken: str | None = None
        self.now_s = 0.0
        self._script, self._refuse = script, refuse

    async def start(self) -> None:
        self.started = True

    def submit(self, generation: Generation) -> TokenStream:
        stream = self.streams.open(self.now_s, len(generation.prompt))
        self.asked[stream.request_id] = generation
        if self._refuse is not None:
            self.end(stream.request_id, "rejected", self._refuse)
        elif self._script is not None:
            for letter in self._script[: generation.max_tokens]:
                self.say(stream.request_id, letter)
            self.end(stream.request_id, "length" if len(self._script) > generation.max_tokens else "stop")
        return stream

    def say(self, request_id: int, letter: str, after_s: float = 0.1) -> None:
        self.now_s += after_s
        self.streams.deliver(self.now_s, {request_id: (ord(letter),)})

    def end(self, request_id: int, status: str, detail: str = "") -> None:
        self.streams.depart(Departure(request_id, status, self.now_s, detail, self.now_s))

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        self.end(request_id, "aborted")

    def stats(self) -> list[ReplicaState]:
        return [ReplicaState(1, 2, 0.25, 3, 40, 8)]

    def problem(self) -> str | None:
        return self.broken

    async def close(self) -> None:
        self.closed = True
