"""From steps to clients: one call a step hands every token to the stream of its request and wakes those who wait for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence

from serving.http.backend import Departure
from serving.http.telemetry import Telemetry


class TokenStream:
    """The tokens of one request on their way to one reader. Times are the backend's clock, seconds."""

    __slots__ = ("_waiter", "arrival_s", "count", "end", "ends_as", "first_s", "last_s", "prompt_tokens", "request_id", "tokens")

    def __init__(self, request_id: int, arrival_s: float, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.first_s = arrival_s
        self.last_s = arrival_s
        self.count = 0  # tokens so far
        self.tokens: list[int] = []  # not read yet
        self.end: Departure | None = None
        self.ends_as = "aborted"  # what an abort by the reader counts as: a stop string is a proper end
        self._waiter: asyncio.Future | None = None

    def wake(self) -> None:
        """Let the reader go on."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def next(self) -> tuple[list[int], Departure | None]:
        """Wait for news: all tokens since the last call, in order, and how the request ended once it has."""
        if not self.tokens and self.end is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        tokens, self.tokens = self.tokens, []
        return tokens, self.end


class Streams:
    """The requests that are being served, by id. For the event loop's thread only."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self._live: dict[int, TokenStream] = {}
        self._ids = itertools.count()
        self._answering = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Requests that have not left."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Those of them that have no token yet."""
        return len(self._live) - self._answering

    def open(self, arrival_s: float, prompt_tokens: int) -> TokenStream:
        """A stream for a request that arrives now, under a new id."""
        stream = TokenStream(next(self._ids), arrival_s, prompt_tokens)
        self._live[stream.request_id] = stream
        self._empty.clear()
        return stream

    def deliver(self, end_s: float, tokens: Mapping[int, Sequence[int]], left: Iterable[Departure] = ()) -> None:
        """Take in a step that ended at ``end_s``. Ids that are not (or no longer) here are ignored."""
        live, itl = self._live, self.telemetry.itl
        produced = 0
        for request_id, new in tokens.items():
            stream = live.get(request_id)
            if stream is None:
                continue
            if stream.count:
                itl.add(end_s - stream.last_s)
            else:
                self._answering += 1
                stream.first_s = end_s
                self.telemetry.began(stream)
            stream.last_s = end_s
            stream.count += len(new)
            produced += len(new)
            stream.tokens += new
            stream.wake()
        self.telemetry.generated += produced
        for departure in left:
            self.depart(departure)

    def depart(self, departure: Departure) -> None:
        """A request has left."""
        stream = self._live.pop(departure.request_id, None)
        if stream is None:
            return
        self._answering -= bool(stream.count)
        self.telemetry.left(stream, departure)
        if stream.end is None:
            stream.end = departure
        stream.wake()
        if not self._live:
            self._empty.set()

    def fail(self, before: int | None, time_s: float, detail: str) -> None:
        """Whatever served the requests with ids below ``before`` (None: all) is gone."""
        for request_id in [each for each in self._live if before is None or each < before]:
            self.depart(Departure(request_id, "error", time_s, detail))

    def next_id(self) -> int:
        """An id above all that were given; it is used up."""
        return next(self._ids)

    async def drained(self) -> None:
        """Wait until every request has left."""
        await self._empty.wait()
