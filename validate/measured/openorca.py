"""Requests like those of MLPerf's OpenOrca set (24,576 prompts) as a Llama-3.1 server sees them. The set itself is not here.

Prompt lengths. All 24,576 prompts have 5,463,976 tokens as Llama 2 counts them: recorded beside the SHA-256 of the benchmark's own
file by another simulator (FlashLab-MBZUAI/HBFSim, validation/calibration/h100-llama2-70b-calibration-protocol.json). Llama 3's
tokenizer needs up to 15 % fewer (Meta's announcement); on eight of the set's questions that are public it needs 14 % fewer.

What prompts share. Every prompt begins with the chat template and one of sixteen system messages. Which of them a collection uses
is in the paper that the set copies (Mukherjee et al., Orca, 2023, Table 2 and Figure 6), less those that the benchmark's
processorca.py drops; it also draws the same number from each of the four collections. ``SHARED`` counts, with Llama 3's tokenizer,
the tokens before the question in the template that the submitter uses (krai/axs2mlperf, convert_openorca_llama2_to_llama3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from serving.request import Arrival, Request
from serving.rng import stream

LONGEST = 1024  # tokens of a prompt and of an answer, by the benchmark's rules
PROMPT_TOKENS = 0.85 * 5_463_976 / 24_576
SIGMA = 0.6  # of the questions' log-normal, assumed: their spread moves nothing at these loads
SHARED: Mapping[str, tuple[int, ...]] = {"cot": (39, 52, 22), "niv": (51, 46, 67, 91), "t0": (33, 51), "flan": (33, 33, 51, 54, 61)}


def evenly(count: int, draws: np.random.Generator) -> np.ndarray:
    """Return ``count`` shares between 0 and 1, evenly spread, in random order: every pass over the set has the same lengths."""
    return (draws.permutation(count) + 0.5) / count


def arrivals(times_s: Sequence[float], answers: Sequence[int], block_tokens: int, seed: int) -> list[Arrival]:
    """Return one request at each time: a collection, one of its system messages and a question of random length."""
    draws = stream(seed, "openorca")
    collections = list(SHARED.values())
    shared_mean = sum(sum(sizes) / len(sizes) for sizes in collections) / len(collections)
    normal = NormalDist(math.log(PROMPT_TOKENS - shared_mean) - SIGMA**2 / 2, SIGMA)
    questions = np.array([math.exp(normal.inv_cdf(share)) for share in evenly(len(times_s), draws).tolist()])
    picks = draws.random((len(times_s), 2))
    result = []
    for i, (time_s, answer, length, (which, message)) in enumerate(zip(times_s, answers, questions.tolist(), picks.tolist())):
        name = int(which * len(collections))
        sizes = collections[name]
        shared = sizes[int(message * len(sizes))]
        prompt = min(shared + max(1, round(length)), LONGEST)
        common = shared // block_tokens
        keys = (*((name, shared, block) for block in range(common)), *((i, block) for block in range(common, prompt // block_tokens)))
        result.append(Arrival(Request(i, time_s, prompt, answer, prefix_hashes=keys, generated_hash_seed=(i,)), answer))
    return result
