"""A waiting queue in the order of a policy's keys, with the ten methods that vLLM's scheduler asks of one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any


class OrderedQueue:
    """Requests of another engine by ``key_of(request)``, which ends in an id of its own: keys never tie.

    While ``closed`` the queue says that it is empty, so that nobody is admitted, but it still counts and lists who waits.
    """

    def __init__(self, key_of: Callable[[Any], tuple]) -> None:
        self.closed = False
        self._key_of = key_of
        self._entries: list[tuple[tuple, Any]] = []

    def add_request(self, request: Any) -> None:
        """Put ``request`` at its place."""
        insort(self._entries, (self._key_of(request), request), key=itemgetter(0))

    def prepend_request(self, request: Any) -> None:
        """Put back a request that was preempted or passed over: its place in the order has not changed."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Put back several."""
        for request in requests:
            self.add_request(request)

    def pop_request(self) -> Any:
        """Take out the first; IndexError when nobody waits."""
        return self._entries.pop(0)[1]

    def peek_request(self) -> Any:
        """The first; IndexError when nobody waits."""
        return self._entries[0][1]

    def remove_request(self, request: Any) -> None:
        """Take out ``request``; ValueError when it does not wait."""
        at = bisect_left(self._entries, self._key_of(request), key=itemgetter(0))
        if at == len(self._entries) or self._entries[at][1] is not request:
            raise ValueError(f"{request} does not wait")
        del self._entries[at]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those of ``requests`` that wait."""
        gone = {id(request) for request in requests}
        if gone:
            self._entries = [entry for entry in self._entries if id(entry[1]) not in gone]

    def __bool__(self) -> bool:
        return bool(self._entries) and not self.closed

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Any]:
        return iter([request for _, request in self._entries])
