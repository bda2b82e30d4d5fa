"""What narrow KV pages and FP8 queries do to the logits of the real engine.

    python -m benchmarks.kv_error [--weights DIR] [--tokens 256] [--prompts 8]

Without weights the network is random (seed 0), and then only the size of the error means something, not what it does to text. Errors are
against the same engine with a cache of the activations' dtype: ``logits`` is the root mean square of the difference over the standard deviation of
the logits, ``top-1`` the share of positions whose first choice stays, ``perplexity`` the change for the prompts' own tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from engine.architecture import from_llm
from engine.loader import load, random_weights
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from serving.catalog import load_llm

CASES = {"bf16 -> fp8": ("fp8", "torch"), "bf16 -> int8": ("int8", "torch"), "bf16 -> int4": ("int4", "torch"), "fp8 query, bf16 KV": (None, "fp8_query")}


def all_logits(runner: Runner, prompts: list[list[int]], chunk: int = 64) -> torch.Tensor:
    """The logits after every token of ``prompts``, computed in chunks over the cache, [tokens of all prompts, vocab]."""
    found: list[torch.Tensor] = []
    forward = runner._forward
    runner._forward = lambda layout, path: found.append(forward(layout, path)) or found[-1]
    width = runner.cache.block_tokens
    for request_id, prompt in enumerate(prompts):
        table = list(range(1, 1 - (-len(prompt) // width)))
        for start in range(0, len(prompt), chunk):
            tokens = prompt[start : start + chunk]
            runner.execute(StepInput([SequenceInput(request_id, tokens, start, table, len(tokens))]))
        runner.execute(StepInput([], (request_id,)))
        found.pop()
    return torch.cat(found).float()


def compare(weights: Path | None, llm: str, tokens: int, prompts: int) -> dict[str, dict[str, float]]:
    """Errors by case."""
    if weights is not None:
        loaded = load(weights, device=torch.device("cpu"), dtype=torch.bfloat16)
        shape, tensors = loaded.shape, loaded.weights
    else:
        shape = from_llm(load_llm(llm))
        tensors = random_weights(shape, 0, device=torch.device("cpu"), dtype=torch.bfloat16)
    rng = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, shape.vocab, (tokens,), generator=rng).tolist() for _ in range(prompts)]
    targets = torch.tensor([[*text[1:], text[0]] for text in texts]).flatten()

    def run(kind: str | None, attention: str) -> torch.Tensor:
        options = RunnerOptions(blocks=2 + tokens // 16, block_tokens=16, max_seqs=2, max_batch_tokens=64, max_model_len=tokens, attention=attention, kv_format=kind)
        return all_logits(Runner(shape, tensors, options), texts)

    exact = run(None, "torch")
    loss = torch.nn.functional.cross_entropy(exact, targets)
    rows = {}
    for name, (kind, attention) in CASES.items():
        logits = run(kind, attention)
        change = torch.nn.functional.cross_entropy(logits, targets) - loss
        rows[name] = {
            "logits": float((logits - exact).square().mean().sqrt() / exact.std()),
            "top-1": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
            "perplexity": float(change.exp() - 1),
        }
    return rows


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--llm", default="scenarios/data/decoder-4x256.yaml")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, row in compare(arguments.weights, arguments.llm, arguments.tokens, arguments.prompts).items():
        print(f"{name:<20} logits {row['logits']:.4f}   top-1 {row['top-1']:.4f}   perplexity {row['perplexity']:+.4%}")


if __name__ == "__main__":
    main()
