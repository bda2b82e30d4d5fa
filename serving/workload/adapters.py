"""Gives requests adapters: by session, so that a conversation stays with one, and their content keys with them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serving.request import Arrival, Request
from serving.scenario.adapters import AdapterMix
from serving.workload.classes import Shares
from serving.workload.context import Context
from serving.workload.sessions import Session

CHUNK = 4096


def adapted_arrivals(arrivals: Iterator[Arrival], mix: AdapterMix, context: Context) -> Iterator[Arrival]:
    """Yield ``arrivals`` with an adapter each."""
    for arrival, name in zip(arrivals, _draw(mix, context)):
        yield arrival._replace(request=with_adapter(arrival.request, name)) if name else arrival


def adapted_sessions(sessions: Iterator[Session], mix: AdapterMix, context: Context) -> Iterator[Session]:
    """Yield ``sessions``, the turns of each with the same adapter."""
    for session, name in zip(sessions, _draw(mix, context)):
        yield _session(session, name) if name else session


def _session(session: Session, name: str) -> Session:
    turns = tuple(turn._replace(arrival=turn.arrival._replace(request=with_adapter(turn.arrival.request, name))) for turn in session.turns)
    return session._replace(turns=turns)


def with_adapter(request: Request, name: str) -> Request:
    """The request under an adapter: keys and values are the adapter's, so equal tokens under another adapter are other content.

    One that names its adapter already, as a trace's may, keeps it.
    """
    if request.adapter:
        return request
    keys = tuple((name, key) for key in request.prefix_hashes)
    return request._replace(adapter=name, prefix_hashes=keys)


def _draw(mix: AdapterMix, context: Context) -> Iterator[str]:
    names = mix.all_names()
    popularity = np.arange(1, len(names) + 1, dtype=np.float64) ** -mix.zipf_exponent
    shares, uses = Shares(popularity.tolist(), context.rng("adapters")), context.rng("adapters.use")
    while True:
        chosen = shares.draw(CHUNK).tolist()
        used = (uses.random(CHUNK) < mix.share).tolist()
        yield from (names[position] if use else "" for position, use in zip(chosen, used))
