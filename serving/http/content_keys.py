"""Names for the content of KV blocks, made of the tokens themselves: equal prefixes have equal keys."""

from __future__ import annotations

from array import array
from hashlib import blake2b


def content_keys(tokens: list[int], block_tokens: int, adapter: str = "") -> tuple[bytes, ...]:
    """One key per full block of ``tokens``, each standing for its block and all before it (16 bytes), read by ``adapter``: under another they are other content."""
    keys, key = [], adapter.encode()
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = blake2b(key + array("q", tokens[end - block_tokens : end]).tobytes(), digest_size=16).digest()
        keys.append(key)
    return tuple(keys)
