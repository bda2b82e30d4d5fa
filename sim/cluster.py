"""A fleet of replicas behind a router, in simulated time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np
import simpy

from serving.errors import IllegalAnswerError
from serving.policies.protocols import Routing
from serving.request import Arrival, Request
from serving.scheduler import Scheduler
from sim.delivery import Delivery
from sim.environment import PLAN, STEP_END, Environment
from sim.replica import Replica

OFFLINE = 1 << 50  # added to the outstanding tokens of a replica that takes no requests: more than any could have
_LIST_BELOW = 32  # replicas: up to here a list finds its minimum faster than numpy does


class FleetSignals:
    """What the router knows: its own routing at once, finishes as of the latest reading of the signals."""

    def __init__(self, replicas: int) -> None:
        self.now_s = 0.0
        self.outstanding_tokens: list[int] | np.ndarray = [0] * replicas if replicas < _LIST_BELOW else np.zeros(replicas, np.int64)
        self._read = [0] * replicas
        self.taking = [True] * replicas
        self.delivery: Delivery | None = None
        self.replicas: list[Replica] = []
        self.reads_queues = False  # for policies that ask for what is below
        self._waiting = [0] * replicas
        self._kv_use = [0.0] * replicas
        self._seen_s = [-1.0] * replicas  # when each queue was read

    def distance_s(self, replica: int) -> float:
        """Seconds before the first byte of the request being routed could reach the replica; 0 where requests cross no links."""
        return 0.0 if self.delivery is None else self.delivery.distance_s(replica)

    def delivery_s(self, replica: int) -> float:
        """Seconds that its tokens would take to get there now; 0 where requests cross no links."""
        return 0.0 if self.delivery is None else self.delivery.delivery_s(replica)

    def least_outstanding(self) -> int:
        """Index of the replica with the fewest outstanding prompt tokens; the lowest among equals."""
        tokens = self.outstanding_tokens
        return tokens.index(min(tokens)) if isinstance(tokens, list) else int(tokens.argmin())

    def online(self, replica: int) -> bool:
        """Whether the replica takes requests."""
        return self.taking[replica]

    def waiting(self, replica: int) -> int:
        """Requests that waited there to be admitted, at the latest reading."""
        return self._waiting[replica]

    def kv_use(self, replica: int) -> float:
        """Share of its KV blocks that requests held, at the latest reading."""
        return self._kv_use[replica]

    def cached_blocks(self, replica: int, keys: tuple) -> int:
        """Leading blocks of a prefix that the replica holds, as it tells its router itself."""
        return self.replicas[replica].scheduler.pool.match(keys, len(keys)).blocks

    def read(self, replicas: list[Replica], as_of_s: float = 0.0) -> None:
        """Take in the requests that have left each replica, and its queue and pool where the policy asks for them: engines tell of
        those once a step, so what came during a step that has not ended is not seen."""
        for replica in replicas if self.reads_queues else ():
            index = replica.index
            if replica.last_end_s > self._seen_s[index] or not replica.executing:
                pool = replica.scheduler.pool
                self._waiting[index], self._kv_use[index] = replica.scheduler.waiting_count, 1.0 - pool.free / pool.total
                self._seen_s[index] = as_of_s
        for replica in replicas:
            finished = replica.finished_prompt_tokens
            index = replica.index
            if finished != self._read[index]:
                self.outstanding_tokens[index] -= finished - self._read[index]
                self._read[index] = finished


class Cluster:
    """Routes requests to lazy replicas.

    Replicas advance when somebody looks. ``on_outcome`` registers a caller who must learn of every request that leaves at
    that very instant (closed loops, sessions); only then, or ``stepwise``, do the replicas put wakes on the event queue.
    """

    def __init__(self, env: Environment, replicas: list[Replica], routing: Routing, *, stepwise: bool = False) -> None:
        self.env = env
        self.replicas = replicas
        self.arrived = 0
        self.signals = FleetSignals(len(replicas))
        self.arrivals_end_s = 0.0
        self._routing = routing
        self.signals.replicas = replicas
        self.signals.reads_queues = getattr(routing, "needs_queues", False)
        self._signal_age_s = getattr(routing, "signal_age_s", 0.0)
        self._reads_load = getattr(routing, "needs_load", False) and len(replicas) > 1
        self._next_read_s = self._signal_age_s if self._reads_load and self._signal_age_s else math.inf
        self._eager = stepwise
        self._armed: list[tuple[float, bool]] = [(math.inf, False)] * len(replicas)
        self._watchers: list[Callable[[int, float, str], None]] = []
        self._online = len(replicas)
        self._held: deque[tuple[Request, int]] = deque()  # requests that came while no replica took any
        self.on_armed: Callable[[Replica], None] | None = None  # called when a replica may have come into service or gone out of it

    @property
    def online(self) -> int:
        """Replicas that take requests."""
        return self._online

    @property
    def routing(self) -> Routing:
        """The policy that chooses replicas."""
        return self._routing

    @property
    def held(self) -> int:
        """Requests that wait for a replica to take them."""
        return len(self._held)

    @property
    def held_tokens(self) -> int:
        """Their prompt tokens."""
        return sum(request.prompt_tokens for request, _ in self._held)

    def set_online(self, index: int, online: bool) -> None:
        """Let a replica take requests, or keep new ones from it; those that were held go out as soon as there is a taker."""
        if self.signals.online(index) == online:
            return
        self.signals.taking[index] = online
        self.signals.outstanding_tokens[index] += -OFFLINE if online else OFFLINE
        self._online += 1 if online else -1
        while self._held and self._online:
            self._dispatch(*self._held.popleft())

    @property
    def now_s(self) -> float:
        """The present simulated time."""
        return self.env.now

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves, at that time and in order of time."""
        self._watchers.append(watcher)
        self.watch()
        for replica in self.replicas:
            replica.on_finish = self._tell

    def watch(self) -> None:
        """Let replicas put their wakes on the event queue, so that everything happens at its own time."""
        self._eager = True

    def _tell(self, request_id: int, time_s: float, status: str) -> None:
        for watcher in self._watchers:
            watcher(request_id, time_s, status)

    def submit(self, request: Request, output_tokens: int) -> int:
        """Route a request now; returns the replica's index, or -1 while no replica takes requests."""
        self.arrived += 1
        self.arrivals_end_s = self.env.now
        return self._dispatch(request, output_tokens)

    def resubmit(self, request: Request, output_tokens: int) -> int:
        """Route a request again that a replica has lost; it keeps the time of its arrival."""
        return self._dispatch(request, output_tokens)

    def refuse(self, request: Request, limit: str) -> int:
        """Turn an arriving request away at ``limit``, in the name of the replica that would have had it; returns its index."""
        self.arrived += 1
        self.arrivals_end_s = self.env.now
        index = self.choose(request, self.env.now)
        self.replicas[index].refuse(request, self.env.now, limit)
        return index

    def lose(self, index: int, scheduler: Scheduler) -> list[Arrival]:
        """A replica's process is gone and starts over with an empty ``scheduler``; returns the requests that it held."""
        self.settle_signals()
        replica = self.replicas[index]
        self.set_online(index, False)
        lost = replica.lose(scheduler, self.env.now)
        self.arm(replica)
        return lost

    def settle_signals(self) -> None:
        """Read the router's signals if they are due: what happens at this instant must not show in an earlier reading."""
        if self.env.now >= self._next_read_s:
            self._read_latest(self.env.now)

    def fail(self, request_id: int) -> None:
        """Tell whoever waits for a request that it has failed for good."""
        self._tell(request_id, self.env.now, "error")

    def _dispatch(self, request: Request, output_tokens: int) -> int:
        if not self._online:
            self._held.append((request, output_tokens))
            return -1
        now_s = self.env.now
        if self.signals.delivery is not None:
            self.signals.delivery.enter(request)
            index = self.choose(request, now_s)
            self.signals.delivery.start(request, output_tokens, index)
            return index
        index = self.choose(request, now_s)
        replica = self.replicas[index]
        replica.submit(request, output_tokens, now_s)
        if self._eager:
            self.arm(replica)
        return index

    def delivered(self, request: Request, output_tokens: int, index: int) -> None:
        """The tokens of a request have reached its replica; if that takes none any more, it is routed again."""
        if not self.signals.online(index):
            if len(self.replicas) > 1:
                self.signals.outstanding_tokens[index] -= request.prompt_tokens
            self._dispatch(request, output_tokens)
            return
        self.replicas[index].submit(request, output_tokens, self.env.now)
        if self._eager:
            self.arm(self.replicas[index])

    def choose(self, request: Request, now_s: float) -> int:
        """Let the routing policy choose a replica and count the request's tokens as outstanding there."""
        if len(self.replicas) == 1:
            return 0
        index = self._route(request, now_s)
        self.signals.outstanding_tokens[index] += request.prompt_tokens
        return index

    def _route(self, request: Request, now_s: float) -> int:
        signals = self.signals
        signals.now_s = now_s
        if now_s >= self._next_read_s:
            self._read_latest(now_s)
        elif self._reads_load and not self._signal_age_s:
            self._read(now_s)
        index = self._routing.route(request, signals)
        if not 0 <= index < len(self.replicas):
            raise IllegalAnswerError(f"routing policy {type(self._routing).__name__} chose replica {index} of {len(self.replicas)}")
        return index if signals.online(index) else signals.least_outstanding()

    def _read_latest(self, now_s: float) -> None:
        """Read the signals as of the latest reading instant. Whatever would change a replica at or after one calls this first, so
        that the reading is the same whether replicas are lazy, have been woken or were looked at.
        """
        age_s = self._signal_age_s
        count = math.floor(now_s / age_s)
        while count * age_s > now_s:  # the quotient may have been rounded up
            count -= 1
        self._next_read_s = (count + 1) * age_s
        self._read(count * age_s)

    def _read(self, as_of_s: float) -> None:
        self.look(as_of_s)
        self.signals.read(self.replicas, as_of_s)

    def look(self, as_of_s: float) -> None:
        """Let every replica do what it would have done by then, for whoever looks at it directly."""
        for replica in self.replicas:
            if replica.next_s < as_of_s:
                replica.advance(as_of_s)
                if self._eager:
                    self.arm(replica)

    def abort(self, request_id: int, replica: int) -> bool:
        """Drop a request that was routed to ``replica`` (-1: to none yet); False when it has left already."""
        self.settle_signals()
        if replica < 0:
            return self._let_go(request_id)
        if self.signals.delivery is not None:
            self.signals.delivery.abandon(request_id)
        gone = self.replicas[replica].abort(request_id, self.env.now)
        if self._eager:
            self.arm(self.replicas[replica])
        return gone

    def _let_go(self, request_id: int) -> bool:
        """Drop a request that waits for a replica to take it."""
        held = next((entry for entry in self._held if entry[0].request_id == request_id), None)
        if held is None:
            return False
        self._held.remove(held)
        self._tell(request_id, self.env.now, "aborted")
        return True

    def arm(self, replica: Replica, quietly: bool = False) -> None:
        """Put the replica's next wake on the event queue, unless that very wake is there already."""
        if self.on_armed is not None and not quietly:
            self.on_armed(replica)
        target = (replica.next_s, replica.executing)
        if target != self._armed[replica.index]:
            self._armed[replica.index] = target
            if target[0] < math.inf:
                self.env.at(target[0], _Wake(self, replica, target), STEP_END if target[1] else PLAN)

    def drain(self) -> None:
        """Let every replica finish what it holds."""
        for replica in self.replicas:
            replica.advance(math.inf)

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        crossing = 0 if self.signals.delivery is None else len(self.signals.delivery)
        return len(self._held) + crossing + sum(replica.scheduler.waiting_count + replica.scheduler.running.count for replica in self.replicas)

    @property
    def end_s(self) -> float:
        """Time of the last arrival or step."""
        return max(self.arrivals_end_s, *(replica.last_end_s for replica in self.replicas))


class _Wake:
    """A wake of one replica; stale, and without effect, once the replica has armed another."""

    __slots__ = ("cluster", "replica", "target")

    def __init__(self, cluster: Cluster, replica: Replica, target: tuple[float, bool]) -> None:
        self.cluster = cluster
        self.replica = replica
        self.target = target

    def __call__(self, event: simpy.Event) -> None:
        cluster, replica = self.cluster, self.replica
        if cluster._armed[replica.index] is self.target:
            cluster.settle_signals()
            cluster._armed[replica.index] = (math.inf, False)
            replica.wake(self.target[0])
            cluster.arm(replica)
