"""What cheaper position encodings change, layer by layer: INT8 rotary tables, and an ALiBi bias cut to a band.

    python -m benchmarks.position_error [--layers 12] [--tokens 512]

A random network (seed 0) of llama-3.2-1b's head width and a sixteenth of its size; errors are of the hidden states of one sequence, the norm of the difference over the norm.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from engine.architecture import from_llm
from engine.loader import random_weights
from engine.whole_sequence import layer_errors
from serving.catalog import load_llm

BANDS = (32, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = replace(load_llm("llama-3.2-1b"), layers=args.layers, hidden=512, heads=8, kv_heads=4, intermediate=1536, vocab=4096)
    rotary = from_llm(llm)
    tokens = torch.randint(0, rotary.vocab, (args.tokens,), generator=torch.Generator().manual_seed(1))
    weights = random_weights(rotary, 0, device=torch.device("cpu"), dtype=torch.float32)
    alibi = replace(rotary, positions="alibi")
    cases = {"INT8 rotary tables": (rotary, replace(rotary, rope_table="int8"))}
    cases |= {f"ALiBi, band of {band}": (alibi, replace(alibi, window=band)) for band in BANDS}
    for name, (exact, cheap) in cases.items():
        errors = layer_errors(exact, cheap, weights, tokens)[:-1]
        print(f"{name:<20} largest of layers 1-5 {max(errors[:5]):.5f}, of the others {max(errors[5:]):.5f}")


if __name__ == "__main__":
    main()
