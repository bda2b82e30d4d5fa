"""Puts images at the front of prompts: their tokens, and content keys that everybody with the same image has too.

A session keeps its image. Blocks behind it have keys of their own for each image, because keys and values depend on all that comes before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from serving.errors import InputError
from serving.request import Arrival, Request
from serving.scenario.images import Images
from serving.workload.classes import Shares
from serving.workload.context import Context
from serving.workload.lengths import largest_tokens, tokens
from serving.workload.sessions import Session

CHUNK = 4096


def most_tokens(spec: Images, block_tokens: int) -> int:
    """Tokens that the largest image takes, in whole blocks. Raises InputError when there is no largest."""
    largest = largest_tokens(spec.tokens)
    if largest is None:
        raise InputError("workload.images.tokens", "may be any number of tokens", "give it a max")
    return -(-largest // block_tokens) * block_tokens


def image_blocks(spec: Images, block_tokens: int, rng: np.random.Generator) -> list[int]:
    """KV blocks that each image fills."""
    drawn = tokens(spec.tokens, rng)(spec.count)
    return (-(-drawn // block_tokens)).tolist()


def pictured_arrivals(arrivals: Iterator[Arrival], spec: Images, context: Context) -> Iterator[Arrival]:
    """Yield ``arrivals``, those with an image longer by it."""
    album = _Album(spec, context)
    for arrival, image in zip(arrivals, album.chosen()):
        yield arrival if image is None else arrival._replace(request=album.before(arrival.request, image))


def pictured_sessions(sessions: Iterator[Session], spec: Images, context: Context) -> Iterator[Session]:
    """Yield ``sessions``, all turns of one about the same image."""
    album = _Album(spec, context)
    for session, image in zip(sessions, album.chosen()):
        if image is None:
            yield session
            continue
        turns = tuple(turn._replace(arrival=turn.arrival._replace(request=album.before(turn.arrival.request, image))) for turn in session.turns)
        yield session._replace(turns=turns)


class _Album:
    def __init__(self, spec: Images, context: Context) -> None:
        self._spec, self._context = spec, context
        self._blocks = image_blocks(spec, context.block_tokens, context.rng("images.tokens"))

    def chosen(self) -> Iterator[int | None]:
        """The image of each request, or None, endlessly."""
        spec, context = self._spec, self._context
        popular = Shares((np.arange(1, spec.count + 1, dtype=np.float64) ** -spec.zipf_exponent).tolist(), context.rng("images"))
        uses = context.rng("images.use")
        while True:
            yield from (image if use else None for image, use in zip(popular.draw(CHUNK).tolist(), (uses.random(CHUNK) < spec.share).tolist()))

    def before(self, request: Request, image: int) -> Request:
        """The request with ``image`` at the front of its prompt."""
        blocks = self._blocks[image]
        length = request.prompt_tokens + blocks * self._context.block_tokens
        seed, keys = request.generated_hash_seed, ()
        if self._context.prefix_caching and self._spec.shared_pages:
            own = (("image", image, block) for block in range(blocks))
            keys = (*own, *(_behind(key, image, blocks) for key in request.prefix_hashes))
            seed = None if seed is None else ("image", image, seed)
        else:
            seed = None
        return request._replace(prompt_tokens=length, prefix_hashes=keys, generated_hash_seed=seed, image=image)


def _behind(key: object, image: int, blocks: int) -> tuple:
    """The key of a block that now has ``image`` before it. Generated content is named by its place in the sequence, which moves."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], tuple):
        seed, index = key
        return (("image", image, seed), index + blocks)
    return ("image", image, key)
