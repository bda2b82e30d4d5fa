"""One protocol per kind of decision, each a few lines.

Policies read views and never a clock of their own, nor a request's true output length. Private state changes only in
``observe(outcome)``, which any policy may define and which is called when a request leaves the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from serving.request import Request

if TYPE_CHECKING:
    from serving.adapters import AdapterSlots
    from serving.builder import PlanBuilder
    from serving.layout import Layout
    from serving.llm import Llm
    from serving.running import Running
    from serving.scheduler import Scheduler
    from serving.sequence import Sequence


class Ordering(Protocol):
    """Who is next."""

    def key(self, request: Request, queue: Scheduler) -> tuple:
        """Sort key of a waiting request, computed once at submission; smaller goes first; must end in the request id."""

    def evicts_from_s(self, request: Request) -> float:
        """Time from which a waiting request may evict running work of a strictly less urgent class; inf for never."""


class Batching(Protocol):
    """What one step holds."""

    def plan(self, batch: PlanBuilder) -> None:
        """Fill the builder."""


class Window(Protocol):
    """When waiting requests may be admitted."""

    def open_s(self, batch: PlanBuilder) -> float:
        """Time from which admission is allowed (at or before ``batch.now_s``: now)."""


class Victim(Protocol):
    """Who gives way."""

    def choose(self, running: Running, beneficiary: Sequence | None) -> Sequence | None:
        """For None blocks are short and a victim must be named; else one strictly less urgent than the beneficiary, or None."""


class Admission(Protocol):
    """Who may queue at all.

    A policy may also have ``retry_after_s(request, queue) -> float | None``: told with a refusal, the seconds after which it is worth
    coming back; None when it cannot say.
    """

    def admit(self, request: Request, queue: Scheduler) -> str | None:
        """None to accept, or the name of the limit for which the request is refused."""


class Reload(Protocol):
    """Whether KV pages that a lower tier holds are read back, or computed again."""

    def load(self, tokens: int, load_s: float, queue: Scheduler) -> bool:
        """Decide for ``tokens`` tokens that take ``load_s`` seconds to read."""


class Eviction(Protocol):
    """Which KV page leaves a tier below the GPU that is full. Pages go by their content key, tiers by number, the nearest being 0."""

    def stored(self, tier: int, key: object) -> None:
        """A page that may leave is in a tier from now on."""

    def used(self, key: object) -> None:
        """A page is read back to the GPU; it cannot leave meanwhile and is stored anew, where it is, once it has been."""

    def left(self, tier: int, key: object) -> None:
        """It may not leave any more, because it has left or is pinned."""

    def forgotten(self, key: object) -> None:
        """It is in no tier any more."""

    def victim(self, tier: int) -> object | None:
        """One of those that may leave; None when all must stay."""


class Speculation(Protocol):
    """How many draft tokens each decode verifies beside its next token."""

    def draft_tokens(self, decodes: int) -> int:
        """Drafts for each of ``decodes`` sequences in the step being planned."""


class Adapters(Protocol):
    """Which adapter leaves when a slot is needed."""

    def evict(self, idle: Seq[str], queue: Scheduler) -> str:
        """One of the loaded adapters that nobody uses; ``idle`` has the one used longest ago first."""


class Retention(Protocol):
    """Which KV pages of a running sequence are kept."""

    most_blocks: int | None  # pages that a sequence keeps at most after a step; None: no bound
    entropy_below: float  # a decode step of lower mean attention entropy counts as calm; 0: the policy does not look

    def drop(self, held: int, calm_steps: int, heat: Seq[float] | None) -> Seq[int]:
        """Positions, ascending, among the ``held`` pages of a sequence that are given back; never the last, which is being written."""


class Sharding(Protocol):
    """How a group of GPUs shares the weights and the KV cache of one replica."""

    def layout(self, llm: Llm, gpus: int) -> Layout:
        """The layout on ``gpus`` GPUs; its ``gpus`` must be as many."""


class Recompile(Protocol):
    """Whether a compiled step plan is made again."""

    drift_above_s: float  # a step whose tensors live longer or shorter than planned by more than this counts as drifted

    def recompile(self, drifted_steps: int) -> bool:
        """Decide after so many drifted steps on end, this one included."""


class KvReuse(Protocol):
    """Which layers read the keys and values of an earlier one."""

    def owners(self, similarity: Seq[float]) -> Seq[int]:
        """For each layer the one whose KV entries it reads, itself included; ``similarity`` compares each layer with the next."""


class Branch(Protocol):
    """Whether a stage looks into its cache first, or computes at once."""

    def cached(self, key: int) -> bool:
        """Decide for what is asked; ``key`` is small and stable."""

    def observe(self, key: int, hit: bool, lookup_s: float | None) -> None:
        """Whether it was there: as a look-up of ``lookup_s`` seconds found, or (None) as keeping what was computed showed."""


class Site(Protocol):
    """Which site on a request's way inwards serves it.

    A policy that names tiers lists them in ``levels_named``, so that a tier that does not exist is refused before anything runs.
    """

    def serve_at(self, request: Request, way: Way) -> int:
        """Position on the way, 0 being nearest to the user."""


class Way(Protocol):
    """The sites that could hold a request, from where it enters to its centre; only those with replicas."""

    levels: Seq[str]  # tier of each
    replicas: Seq[int]
    round_trip_s: Seq[float]  # from where the request enters

    def waiting(self, position: int) -> int:
        """Requests that are on their way to a site or have not been started there."""


class Routing(Protocol):
    """Which replica serves a request."""

    def route(self, request: Request, fleet: Fleet) -> int:
        """Index of the chosen replica."""


class Fleet(Protocol):
    """What a router may know. Signals are as old as ``signal_age_s`` says; what it routed itself it knows at once.

    ``outstanding_tokens`` of a replica that takes no requests (starting, draining, lost) are beyond any that one could have.
    """

    now_s: float
    outstanding_tokens: list[int]

    def online(self, replica: int) -> bool:
        """Whether the replica takes requests."""

    def distance_s(self, replica: int) -> float:
        """Seconds before the first byte of the request being routed could reach the replica; 0 where there is no topology."""

    def delivery_s(self, replica: int) -> float:
        """Seconds that its tokens would take to get there now, with what this router has under way; 0 where there is no topology."""

    def least_outstanding(self) -> int:
        """The replica with the fewest outstanding tokens; the lowest among equals."""

    def waiting(self, replica: int) -> int:
        """Requests that waited there to be admitted; read for policies with ``needs_queues`` (and ``needs_load``)."""

    def kv_use(self, replica: int) -> float:
        """Share of its KV blocks that requests held; read for policies with ``needs_queues``."""

    def cached_blocks(self, replica: int, keys: tuple) -> int:
        """Leading blocks of a prefix that the replica holds, as it tells its router itself."""


class Autoscaling(Protocol):
    """How many replicas there should be."""

    def target(self, fleet: FleetState) -> int:
        """Replicas wanted, those that start included; the caller keeps it within the fleet's bounds."""


class FleetState(Protocol):
    """What an autoscaler may know."""

    now_s: float
    ready: int  # replicas that take requests
    starting: int
    provisioned: int  # ready and starting
    pending: int  # requests that wait
    outstanding_tokens: int  # prompt tokens of unfinished requests

    def use(self, signal: str) -> float:
        """Mean use of the ready replicas since the last time it was asked for: ``occupancy``, ``kv`` or ``busy``, in [0, 1]."""

    def violations(self, window_s: float) -> int:
        """Requests that left within the last ``window_s`` without meeting their objectives."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one step. ``max_chunk_tokens`` caps the share of one prompt; None leaves it to the token budget."""

    max_batch_tokens: int = 2048
    max_batch_seqs: int = 256
    max_chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Policies:
    """The decisions of one replica. Policies keep state: build a set for each replica."""

    ordering: Ordering
    batching: Batching
    window: Window
    victim: Victim
    admission: Admission
    limits: Limits
    reload: Reload | None = None  # needed where the pool has lower tiers
    speculation: Speculation | None = None
    retention: Retention | None = None  # needs a speculation policy beside it (of no drafts, if there are none): decodes are then walked
    adapters: AdapterSlots | None = None  # None: requests may use any adapter at once

    def observers(self) -> list[Callable]:
        """The ``observe`` methods of those policies that learn from outcomes."""
        members = (self.ordering, self.batching, self.window, self.victim, self.admission, self.reload)
        return [policy.observe for policy in members if hasattr(policy, "observe")]
