"""A request as the scheduler may know it: facts at arrival, never the true output length."""

from __future__ import annotations

import math
from typing import NamedTuple


class Request(NamedTuple):
    """One generation request. A NamedTuple because millions are made: half the cost of a frozen dataclass.

    ``prefix_hashes`` holds one content key per *full* KV block of the prompt, in order. A key stands for its block and
    all blocks before it (chained), so equal keys mean equal prefixes. Empty: the content is unknown and never shared.
    ``generated_hash_seed`` names the content that will be generated (a session turn); generated block ``i`` of the
    sequence then has the key ``(generated_hash_seed, i)``; ``None`` means that nobody can ever ask for it again.
    """

    request_id: int
    arrival_s: float
    prompt_tokens: int
    max_output_tokens: int
    priority: int = 0  # smaller is more urgent
    class_name: str = "default"
    tenant: str = ""
    session: int | None = None
    prefix_hashes: tuple = ()
    generated_hash_seed: tuple | None = None
    ttft_slo_s: float = math.inf
    adapter: str = ""  # its name; KV computed under an adapter is content of its own, and has keys of its own
    image: int | None = None  # the one its prompt begins with; its pages are part of the prompt's


class Arrival(NamedTuple):
    """A request and the number of tokens it will truly generate; only oracles and runners may read the latter."""

    request: Request
    output_tokens: int
