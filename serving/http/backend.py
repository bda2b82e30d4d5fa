"""What the HTTP surface needs of whatever generates tokens, and the facts that cross between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from serving.http.delivery import Streams, TokenStream

#: How a request may leave. ``stop`` and ``length`` are answers; ``kv_capacity`` ends an answer at the wall of the pool.
STATUSES = ("stop", "length", "kv_capacity", "aborted", "error", "rejected")


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as the backend gets it: token ids, and limits that were checked. ``priority``: smaller is more urgent."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    priority: int = 0
    tenant: str = ""
    adapter: str = ""


class Departure(NamedTuple):
    """A request has left at ``time_s`` by the backend's clock. ``detail``: the limit that refused it, or what went wrong.

    ``retry_after_s``: after so many real seconds a refused request is worth another try, says the admission policy; infinite: never,
    None: it says nothing.
    """

    request_id: int
    status: str
    time_s: float
    detail: str = ""
    scheduled_s: float = float("nan")
    retry_after_s: float | None = None


class ReplicaState(NamedTuple):
    """One replica now. ``kv_usage`` is a fraction; counts are from the start, the prefix cache's in tokens.

    ``state``: ``ready`` takes requests (see ``sim.dynamics``). ``pool``: what it is there for, where replicas differ.
    """

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    state: str = "ready"
    pool: str = ""


class Decoder(Protocol):
    """Turns one answer's tokens into text as they come."""

    def push(self, token: int) -> str:
        """Text that ``token`` completes; may be empty when a character is not complete yet."""

    def flush(self) -> str:
        """What is left at the end."""


class Tokenizer(Protocol):
    """Text to tokens and back. Valid token ids are below ``vocab``."""

    vocab: int

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation of (role, text), ready for the assistant's answer."""

    def decoder(self) -> Decoder:
        """A decoder for one answer."""


class Backend(Protocol):
    """Generates tokens. All methods are called in the event loop's thread, ``start`` first."""

    llm: str  # the name that clients give as ``model``
    adapters: Collection[str]  # names that they may give instead: the same network under that adapter
    max_model_len: int
    tokenizer: Tokenizer
    streams: Streams

    async def start(self) -> None:
        """Begin to serve."""

    def submit(self, generation: Generation) -> TokenStream:
        """Queue a request. Its stream yields the tokens, or tells that and why it was refused."""

    def abort(self, request_id: int) -> None:
        """Drop a request and free what it holds; one that has left already is ignored."""

    def stats(self) -> list[ReplicaState]:
        """The replicas now."""

    def problem(self) -> str | None:
        """Why nothing can be served any more, or None."""

    async def close(self) -> None:
        """Stop; whatever is still here is dropped."""
