"""Cosines between the KV entries of neighbouring layers, who would share at which threshold, and what sharing does to the logits.

    python -m benchmarks.layer_similarity [--weights DIR] [--text FILE] [--tokens 512] [--cosine 0.97 0.92] [--group 2]

Without weights the network is random. With ``--text`` the folder's tokenizer reads the file; else tokens are random, which no network was made for. ``logits`` and
``top-1`` as in ``benchmarks.kv_error``, against the same network with keys and values of its own in every layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.kv_error import all_logits
from engine.architecture import Architecture, from_llm
from engine.layer_similarity import neighbour_cosines, state_cosines
from engine.loader import load, random_weights
from engine.model import DecoderWeights
from engine.runner import Runner, RunnerOptions
from serving.catalog import load_llm
from serving.policies.kv_reuse.threshold import Threshold

LLM = "scenarios/data/decoder-4x256.yaml"


def network(weights: Path | None) -> tuple[Architecture, DecoderWeights]:
    """A local folder's, or a random one."""
    cpu = torch.device("cpu")
    if weights is not None:
        loaded = load(weights, device=cpu, dtype=torch.float32)
        return loaded.shape, loaded.weights
    shape = from_llm(load_llm(LLM))
    return shape, random_weights(shape, 0, device=cpu, dtype=torch.float32)


def texts(weights: Path | None, file: Path | None, shape: Architecture, tokens: int) -> list[list[int]]:
    """Four texts: pieces of the file, or random tokens."""
    if file is None:
        rng = torch.Generator().manual_seed(1)
        return [torch.randint(0, shape.vocab, (tokens,), generator=rng).tolist() for _ in range(4)]
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(weights / "tokenizer.json")).encode(file.read_text(encoding="utf-8")).ids
    return [ids[first : first + tokens] for first in range(0, min(len(ids), 4 * tokens), tokens)]


def main() -> None:
    """Print the cosines and a line a threshold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--cosine", type=float, nargs="*", default=[0.97, 0.95, 0.92, 0.8])
    parser.add_argument("--group", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape, weights = network(arguments.weights)
    read = texts(arguments.weights, arguments.text, shape, arguments.tokens)
    options = RunnerOptions(blocks=2 + arguments.tokens // 16, block_tokens=16, max_seqs=2, max_batch_tokens=64, max_model_len=arguments.tokens, attention="torch")
    plain = Runner(shape, weights, options)
    exact = all_logits(plain, read)
    for name, cosines in (("KV entries", neighbour_cosines(plain, read)), ("hidden states", state_cosines(shape, weights, read))):
        print(f"{name}: [" + ", ".join(f"{max(0.0, cosine):.2f}" for cosine in cosines) + "]")
        judge(cosines, arguments.cosine, arguments.group, lambda owners: all_logits(Runner(replace(shape, kv_owners=owners), weights, options), read), exact)


def judge(
    cosines: list[float], thresholds: list[float], group: int, logits_with: Callable[[tuple[int, ...]], torch.Tensor], exact: torch.Tensor
) -> None:  # fmt: skip
    """Print a line a threshold."""
    for threshold in thresholds:
        owners = tuple(Threshold(cosine=threshold, group=group).owners([min(1.0, max(0.0, cosine)) for cosine in cosines]))
        sharing = sum(owner != layer for layer, owner in enumerate(owners))
        if not sharing:
            print(f"  cosine {threshold:.2f}: no layer shares")
            continue
        logits = logits_with(owners)
        error, stays = float((logits - exact).square().mean().sqrt() / exact.std()), float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        print(f"  cosine {threshold:.2f}: {sharing} of {len(owners)} layers share, KV bytes -{sharing / len(owners):.1%}, logits {error:.1%}, top-1 stays {stays:.1%}")


if __name__ == "__main__":
    main()
