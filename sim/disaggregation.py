"""Prefill and decode on different replicas, with the KV pages of a prompt crossing the links between them.

    arrival -> a prefill replica -> first token -> pages reserved on a decode replica -> transfer -> decodes until done

A prompt's pages stay on the prefill replica until they are copied. When the chosen decode replica has no pages free the
request waits for it, first come first served, and keeps holding its pages on the prefill side: back-pressure that reaches
the router once the prefill pool is full. What the decode replica's prefix cache holds already is not sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from serving.request import Request
from serving.sequence import PARKED, Sequence
from sim.cluster import Cluster
from sim.environment import Environment
from sim.network import Network
from sim.replica import Replica


class HandOver:
    """One request on its way from a prefill replica to a decode replica."""

    __slots__ = ("asked_s", "decode", "flows_left", "landing", "output_tokens", "parked", "prefill", "started_s")

    def __init__(self, prefill: Replica, parked: Sequence, decode: Replica, output_tokens: int, now_s: float) -> None:
        self.prefill = prefill
        self.parked = parked
        self.decode = decode
        self.output_tokens = output_tokens
        self.asked_s = now_s
        self.started_s = now_s
        self.landing: Sequence | None = None
        self.flows_left = 0


class Disaggregated:
    """Two clusters and the network between them, with the interface of one ``Cluster``.

    ``gpus_of(replica)`` names the GPUs of a replica by tensor-parallel rank; ``kv_bytes_per_token`` is of all ranks together.
    """

    def __init__(
        self, prefill: Cluster, decode: Cluster, network: Network, gpus_of: Callable[[Replica], list[str]], kv_bytes_per_token: float
    ) -> None:
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
        self._output_tokens: dict[int, int] = {}
        self._waiting: list[deque[HandOver]] = [deque() for _ in decode.replicas]
        self._short: dict[int, None] = {}  # decode replicas that have no pages for the first in their queue
        for replica in prefill.replicas:
            replica.goes_on = self._goes_on
            replica.on_hand_over = self._hand_over
        prefill.watch()
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
        on_the_way = sum(replica.scheduler.parked for replica in self.decode.replicas) + sum(len(queue) for queue in self._waiting)
        return self.prefill.in_flight + on_the_way + self.decode.in_flight

    @property
    def end_s(self) -> float:
        """Time of the last arrival or step."""
        return max(self.prefill.end_s, self.decode.end_s)

    def submit(self, request: Request, output_tokens: int) -> int:
        """Route a request to a prefill replica now; what the decode pool could never hold is refused."""
        self._output_tokens[request.request_id] = min(output_tokens, request.max_output_tokens)
        pool = self.decode.replicas[0].scheduler.pool
        if pool.blocks_for(request.prompt_tokens + 1) > pool.total:
            self.prefill.replicas[0].refuse(request, self.env.now, "kv_capacity")
            return 0
        return self.prefill.submit(request, 1)

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
        output_tokens = self._output_tokens.pop(seq.request_id)
        decode = self.decode.replicas[self.decode.choose(seq.request, now_s)]
        hand_over = HandOver(replica, seq, decode, output_tokens, now_s)
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
        for lane in range(lanes):
            source, target = sources[lane % len(sources)], targets[lane % len(targets)]
            self.network.start(source, target, size_bytes / lanes, lambda flow: self._lane_done(hand_over))

    def _lane_done(self, hand_over: HandOver) -> None:
        hand_over.flows_left -= 1
        if hand_over.flows_left:
            return
        now_s = self.env.now
        self.transfer_s += now_s - hand_over.started_s
        hand_over.prefill.release_parked(hand_over.parked, now_s)
        self.prefill.arm(hand_over.prefill)
        hand_over.decode.land(hand_over.landing, hand_over.output_tokens, now_s)
        self.decode.arm(hand_over.decode)

    def _decode_outcome(self, request_id: int, time_s: float, status: str) -> None:
        """Pages came free somewhere in the decode pool."""
        for index in list(self._short):
            self._serve(self.decode.replicas[index])
