"""What the prompts of a scenario say: random tokens, equal where the scenario says that content is equal."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from serving.request import Request

if TYPE_CHECKING:
    from engine.images import VisualTokens


class Prompts:
    """Makes the prompt of a request from the seed and its id alone; full blocks with a content key are made from seed and key.

    A later turn of a session quotes what was generated before it: ``remember`` keeps that under the keys it will be asked for by.
    """

    def __init__(self, seed: int, vocab: int, block_tokens: int, images: VisualTokens | None = None) -> None:
        """``images`` gives the tokens of those that prompts begin with; None: they are made up like text."""
        self._images = images
        self._seed = seed
        self._vocab = vocab
        self._block_tokens = block_tokens
        self._generated: dict[tuple, list[int]] = {}

    def tokens(self, request: Request) -> list[int]:
        """The prompt of ``request``, ``prompt_tokens`` long."""
        made: list[int] = []
        if request.image is not None and self._images is not None:
            made = self._images.tokens_of(request.image)
        for key in request.prefix_hashes[len(made) // self._block_tokens :]:
            made += self._generated.get(key) or self._draw(repr(key), self._block_tokens)
        return made + self._draw(f"request {request.request_id}", request.prompt_tokens - len(made))

    def remember(self, request: Request, tokens: list[int]) -> None:
        """Keep the blocks that ``request`` generated (the end of its prompt in the first of them), if a later turn may quote them."""
        seed = request.generated_hash_seed
        if seed is None:
            return
        width = self._block_tokens
        for index in range(len(request.prefix_hashes), len(tokens) // width):
            self._generated[(seed, index)] = tokens[index * width : (index + 1) * width]

    def _draw(self, name: str, count: int) -> list[int]:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, zlib.crc32(name.encode())])))
        return rng.integers(0, self._vocab, count).tolist()
