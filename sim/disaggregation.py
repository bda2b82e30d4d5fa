"""Prefill and decode on different replicas, with the KV pages of a prompt crossing the links between them.

    arrival -> a prefill replica -> first token -> pages reserved on a decode replica -> transfer -> decodes until done

A prompt's pages stay on the prefill replica until they are copied. When the chosen decode replica has no pages free the
request waits for it, first come first served, and keeps holding its pages on the prefill side: back-pressure that reaches
the router once the prefill pool is full. What the decode replica's prefix cache holds already is not sent. The client has
the first token when it is computed, or, where the decode side sends all answers, when the pages have landed there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from serving.request import Arrival, Request
from serving.scheduler import Scheduler
from serving.sequence import PARKED, Sequence
from sim.cluster import Cluster
from sim.environment import Environment
from sim.flows import Flow
from sim.network import Network
from sim.replica import Replica


class HandOver:
    """One request on its way from a prefill replica to a decode replica."""

    __slots__ = ("asked_s", "decode", "flows", "flows_left", "landing", "output_tokens", "parked", "prefill", "started_s")

    def __init__(self, prefill: Replica, parked: Sequence, output_tokens: int) -> None:
        self.prefill = prefill
        self.parked = parked
        self.output_tokens = output_tokens
        self.decode: Replica | None = None  # none takes it yet
        self.asked_s = self.started_s = 0.0
        self.landing: Sequence | None = None
        self.flows: list[Flow] = []
        self.flows_left = 0


class Disaggregated:
    """Two clusters and the network between them, with the interface of one ``Cluster``.

    ``gpus_of(replica)`` names the GPUs of a replica by tensor-parallel rank; ``kv_bytes_per_token`` is of all ranks together.
    ``decode_answers``: the decode side sends the first token too.
    """

    def __init__(
        self, prefill: Cluster, decode: Cluster, network: Network, gpus_of: Callable[[Replica], list[str]], kv_bytes_per_token: float,
        *, decode_answers: bool = False,
    ) -> None:  # fmt: skip
        self.env: Environment = prefill.env
        self.prefill = prefill
        self.decode = decode
        self.network = network
        self.transfers = 0
        self.transferred_bytes = 0.0
        self.transfer_s = 0.0
        self.waited_s = 0.0  # for pages on the decode side
        self._gpus_of = gpus_of
        self._kv_bytes_per_token = kv_bytes_per_token
        self._decode_answers = decode_answers
        self.on_landed: Callable[[int, Replica, float], None] | None = None  # called when the pages of a request have reached a replica
        self.on_released: Callable[[int], None] | None = None  # called when pages of the replica at a position have been copied out
        self._output_tokens: dict[int, int] = {}
        self._waiting: list[deque[HandOver]] = [deque() for _ in decode.replicas]
        self._crossing: dict[int, HandOver] = {}  # by request, in the order in which their copies began
        self._homeless: deque[HandOver] = deque()  # no decode replica takes requests
        self._short: dict[int, None] = {}  # decode replicas that have no pages for the first in their queue
        for replica in prefill.replicas:
            replica.goes_on = self._goes_on
            replica.on_hand_over = self._hand_over
        prefill.on_outcome(self._prefill_outcome)
        decode.on_outcome(self._decode_outcome)

    # -- the interface of a cluster -------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, the prefill pool first."""
        return [*self.prefill.replicas, *self.decode.replicas]

    @property
    def arrived(self) -> int:
        """Requests submitted so far."""
        return self.prefill.arrived

    @property
    def arrivals_end_s(self) -> float:
        """Time of the last arrival."""
        return self.prefill.arrivals_end_s

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left: in either pool, or on their way between them."""
        landing = sum(replica.scheduler.landing.parked for replica in self.decode.replicas)
        on_the_way = landing + sum(len(queue) for queue in self._waiting) + len(self._homeless)
        return self.prefill.in_flight + on_the_way + self.decode.in_flight

    @property
    def end_s(self) -> float:
        """Time of the last arrival or step."""
        return max(self.prefill.end_s, self.decode.end_s)

    def submit(self, request: Request, output_tokens: int) -> int:
        """Route a request to a prefill replica now; what the decode pool could never hold is refused."""
        pool = self.decode.replicas[0].scheduler.pool
        if pool.blocks_for(request.prompt_tokens + 1) > pool.total:
            return self.prefill.refuse(request, "kv_capacity")
        self._output_tokens[request.request_id] = min(output_tokens, request.max_output_tokens)
        return self.prefill.submit(request, 1)

    def resubmit(self, request: Request, output_tokens: int) -> int:
        """Route a request again that a replica has lost, or refused, to begin with its prompt; it keeps the time of its arrival.

        A prefill replica refuses what it thinks will end with its first token: the true length is known here.
        """
        self._output_tokens.setdefault(request.request_id, output_tokens)
        return self.prefill.resubmit(request, 1)

    def abort(self, request_id: int, position: int) -> bool:
        """Drop a request that came to the replica at ``position`` (-1: to none yet); False when it has left already, or its pages are
        being copied: drop it once they have landed.
        """
        if request_id in self._crossing:
            return False
        for queue in (*self._waiting, self._homeless):
            for hand_over in [each for each in queue if each.parked.request_id == request_id]:
                queue.remove(hand_over)
                self._unask(hand_over)
        pool, index = self._pool_of(position)
        gone = pool.abort(request_id, index)
        self._serve_short()
        return gone

    def fail(self, request_id: int) -> None:
        """Tell whoever waits for a request that it has failed for good."""
        self.prefill.fail(request_id)

    def positions(self, role: str) -> range:
        """Where the replicas of a pool stand among ``replicas``."""
        first, end = len(self.prefill.replicas), len(self.prefill.replicas) + len(self.decode.replicas)
        return range(first) if role == "prefill" else range(first, end)

    def held_by(self, role: str) -> tuple[int, int]:
        """Requests that wait for a pool, or for pages in it, and their prompt tokens."""
        if role == "prefill":
            return self.prefill.held, self.prefill.held_tokens
        waiting = [hand_over.parked.request.prompt_tokens for queue in (*self._waiting, self._homeless) for hand_over in queue]
        return len(waiting), sum(waiting)

    def awaited(self, position: int) -> bool:
        """Whether requests wait for pages of a decode replica."""
        pool, index = self._pool_of(position)
        return pool is self.decode and bool(self._waiting[index])

    @property
    def held(self) -> int:
        """Requests that wait for a replica to take them, in either pool."""
        return self.prefill.held + len(self._homeless)

    def arm(self, replica: Replica) -> None:
        """Put the replica's next wake on the event queue."""
        self._pool_of(replica.label)[0].arm(replica)

    def settle_signals(self) -> None:
        """Read the routers' signals if they are due."""
        self.prefill.settle_signals()
        self.decode.settle_signals()

    def watch(self) -> None:
        """Everything happens at its own time here anyway."""

    def _pool_of(self, position: int) -> tuple[Cluster, int]:
        """The pool of the replica at ``position`` of ``replicas``, and its index there."""
        first = len(self.prefill.replicas)
        return (self.prefill, position) if position < first else (self.decode, position - first)

    def on_outcome(self, watcher: Callable[[int, float, str], None]) -> None:
        """Call ``watcher(request_id, time_s, status)`` when a request leaves the fleet, at that time and in order of time."""
        self.prefill.on_outcome(watcher)
        self.decode.on_outcome(watcher)

    def drain(self) -> None:
        """Nothing is left once the event queue is empty: every replica wakes itself."""

    # -- hand-over ------------------------------------------------------------------------------------------------------

    def _goes_on(self, seq: Sequence) -> bool:
        if self._output_tokens[seq.request_id] > seq.generated:
            return True
        del self._output_tokens[seq.request_id]
        return False

    def _hand_over(self, replica: Replica, seq: Sequence, now_s: float) -> None:
        """``seq`` has its first token on a prefill replica: choose where it decodes and ask for pages there."""
        self._ask(HandOver(replica, seq, self._output_tokens.pop(seq.request_id)), now_s)

    def _ask(self, hand_over: HandOver, now_s: float) -> None:
        if not self.decode.online:
            self._homeless.append(hand_over)
            return
        hand_over.decode = decode = self.decode.replicas[self.decode.choose(hand_over.parked.request, now_s)]
        hand_over.asked_s = now_s
        queue = self._waiting[decode.index]
        queue.append(hand_over)
        if len(queue) == 1:
            self._serve(decode)

    def _serve(self, decode: Replica) -> None:
        """Reserve pages for the requests that wait for ``decode``, in order, until one does not fit."""
        queue, now_s = self._waiting[decode.index], self.env.now
        while queue:
            hand_over = queue[0]
            parked = hand_over.parked
            if parked.state == PARKED:
                landing = decode.reserve(parked.request, parked.generated, now_s)
                self.decode.arm(decode)  # its run was cut
                if landing is None:
                    self._short[decode.index] = None
                    return
                self._start(hand_over, landing, now_s)
            queue.popleft()
        self._short.pop(decode.index, None)

    def _start(self, hand_over: HandOver, landing: Sequence, now_s: float) -> None:
        parked = hand_over.parked
        for name in ("scheduled_s", "first_token_s", "token_s", "cached_tokens", "preemptions"):
            setattr(landing, name, getattr(parked, name))
        hand_over.landing = landing
        hand_over.started_s = now_s
        self.waited_s += now_s - hand_over.asked_s
        block_tokens = hand_over.decode.scheduler.pool.block_tokens
        missing = parked.request.prompt_tokens - landing.shared_blocks * block_tokens
        sources, targets = self._gpus_of(hand_over.prefill), self._gpus_of(hand_over.decode)
        lanes = max(len(sources), len(targets))
        size_bytes = missing * self._kv_bytes_per_token
        self.transfers += 1
        self.transferred_bytes += size_bytes
        hand_over.flows_left = lanes
        self._crossing[parked.request_id] = hand_over
        ends = [(sources[lane % len(sources)], targets[lane % len(targets)]) for lane in range(lanes)]
        hand_over.flows = [
            self.network.start(source, target, size_bytes / lanes, lambda flow: self._lane_done(hand_over)) for source, target in ends
        ]

    def _lane_done(self, hand_over: HandOver) -> None:
        hand_over.flows_left -= 1
        if hand_over.flows_left:
            return
        now_s = self.env.now
        del self._crossing[hand_over.parked.request_id]
        self.transfer_s += now_s - hand_over.started_s
        if self._decode_answers:
            hand_over.landing.first_token_s = hand_over.landing.token_s = now_s
        hand_over.prefill.release_parked(hand_over.parked, now_s)
        self.prefill.arm(hand_over.prefill)
        if self.on_released is not None:
            self.on_released(hand_over.prefill.index)
        hand_over.decode.land(hand_over.landing, hand_over.output_tokens, now_s)
        self.decode.arm(hand_over.decode)
        if self.on_landed is not None:
            self.on_landed(hand_over.parked.request_id, hand_over.decode, now_s)

    def _prefill_outcome(self, request_id: int, time_s: float, status: str) -> None:
        """Whoever leaves from there (refused, aborted) does not go on."""
        self._output_tokens.pop(request_id, None)

    def _decode_outcome(self, request_id: int, time_s: float, status: str) -> None:
        """Pages came free somewhere in the decode pool."""
        self._serve_short()

    def _serve_short(self) -> None:
        for index in list(self._short):
            self._serve(self.decode.replicas[index])

    # -- faults ---------------------------------------------------------------------------------------------------------

    def know_routes(self) -> None:
        """Ask for every route that pages may take, so that links can be named before the first transfer."""
        for prefill in self.prefill.replicas:
            for decode in self.decode.replicas:
                sources, targets = self._gpus_of(prefill), self._gpus_of(decode)
                for lane in range(max(len(sources), len(targets))):
                    self.network.graph.route(sources[lane % len(sources)], targets[lane % len(targets)])

    def set_online(self, position: int, online: bool) -> None:
        """Let a replica take requests or hand-overs, or keep new ones from it."""
        pool, index = self._pool_of(position)
        pool.set_online(index, online)
        while self._homeless and self.decode.online:
            self._ask(self._homeless.popleft(), self.env.now)

    def lose(self, position: int, scheduler: Scheduler) -> list[Arrival]:
        """A replica's process is gone and starts over with an empty ``scheduler``; returns the requests that must begin again.

        A prompt that waits on a prefill replica for room elsewhere is lost with that replica, and only with that one.
        """
        pool, index = self._pool_of(position)
        return self._lose_prefill(index, scheduler) if pool is self.prefill else self._lose_decode(index, scheduler)

    def _lose_prefill(self, index: int, scheduler: Scheduler) -> list[Arrival]:
        replica, now_s = self.prefill.replicas[index], self.env.now
        output_tokens: dict[int, int] = {}
        for hand_over in [each for each in self._crossing.values() if each.prefill is replica]:
            self._stop_copy(hand_over)
            hand_over.decode.release_parked(hand_over.landing, now_s)
            self.decode.arm(hand_over.decode)
            output_tokens[hand_over.parked.request_id] = hand_over.output_tokens
        for queue in (*self._waiting, self._homeless):
            for hand_over in [each for each in queue if each.prefill is replica]:
                queue.remove(hand_over)
                self._unask(hand_over)
                output_tokens[hand_over.parked.request_id] = hand_over.output_tokens
        lost = self.prefill.lose(index, scheduler)
        self._serve_short()
        waited = self._output_tokens
        return [
            Arrival(request, output_tokens[request.request_id] if request.request_id in output_tokens else waited.pop(request.request_id))
            for request, _ in lost
        ]

    def _lose_decode(self, index: int, scheduler: Scheduler) -> list[Arrival]:
        replica = self.decode.replicas[index]
        moving = [each for each in self._crossing.values() if each.decode is replica]
        for hand_over in moving:
            self._stop_copy(hand_over)
        waiting = list(self._waiting[index])
        self._waiting[index].clear()
        self._short.pop(index, None)
        for hand_over in waiting:
            self._unask(hand_over)
        lost = self.decode.lose(index, scheduler)
        for hand_over in (*moving, *waiting):  # their pages are still where they were computed
            self._ask(hand_over, self.env.now)
        return [arrival for arrival in lost if arrival.output_tokens]

    def _unask(self, hand_over: HandOver) -> None:
        """The chosen decode replica is not to have it after all."""
        if hand_over.decode is not None:
            hand_over.decode.finished_prompt_tokens += hand_over.parked.request.prompt_tokens
            hand_over.decode = None

    def _stop_copy(self, hand_over: HandOver) -> None:
        now_s = self.env.now
        del self._crossing[hand_over.parked.request_id]
        self.transfer_s += now_s - hand_over.started_s
        for flow in hand_over.flows:
            self.transferred_bytes -= flow.bytes - self.network.moved_bytes(flow)
            self.network.cancel(flow)
