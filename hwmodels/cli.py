"""The ``memory`` command, and the tables behind ``list gpus|llms|latency-models``. Heavy imports happen inside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from serving.memory import KvCapacity

JSON_KEYS = ("weights_gib", "activation_gib", "non_torch_gib", "kv_gib", "kv_bytes_per_token", "blocks", "kv_tokens", "max_concurrency",
             "fits", "binding_limit")  # fmt: skip
_FLAGS = {"tensor_parallel": "--tp"}

Row = tuple[str, ...]
Measured = Annotated[float | None, typer.Option(metavar="X", help="Measured GiB, instead of the computed.")]


def register(app: typer.Typer) -> None:
    """Add this room's commands to the app."""
    app.command("memory")(memory)


def memory(
    llm: Annotated[str, typer.Option(metavar="NAME", help="A language model of the catalogue, or a file of the same form.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="A GPU of the catalogue, or a file of the same form.")],
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="GPUs that share one replica (tensor parallel).")] = 1,
    memory_fraction: Annotated[float, typer.Option(metavar="F", help="Share of the GPU's memory the engine may use.")] = 0.9,
    block_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per KV block.")] = 16,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="Longest sequence to serve; the model's own by default.")] = None,
    weight_dtype: Annotated[str | None, typer.Option(metavar="D", help="Dtype of the weights; the checkpoint's own by default.")] = None,
    kv_dtype: Annotated[str, typer.Option(metavar="D", help="Dtype of the KV cache.")] = "bf16",
    weights_gib: Measured = None,
    activation_gib: Measured = None,
    non_torch_gib: Measured = None,
    gpu_gib: Measured = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """How much KV cache a language model leaves on a GPU, and what limits it."""
    from serving.catalog import load_gpu, load_llm
    from serving.errors import InputError
    from serving.memory import kv_capacity

    chosen_llm, chosen_gpu = load_llm(llm, "--llm"), load_gpu(gpu, "--gpu")
    try:
        capacity = kv_capacity(
            chosen_llm, chosen_gpu, tensor_parallel=tp, memory_fraction=memory_fraction, block_tokens=block_tokens,
            max_model_len=max_model_len, weight_dtype=weight_dtype, kv_dtype=kv_dtype, weights_gib=weights_gib,
            activation_gib=activation_gib, non_torch_gib=non_torch_gib, gpu_gib=gpu_gib,
        )  # fmt: skip
    except InputError as error:
        key = error.where.rsplit(".", 1)[-1]
        raise InputError(_FLAGS.get(key, "--" + key.replace("_", "-")), error.problem, error.hint) from None
    if as_json:
        print(json.dumps({key: getattr(capacity, key) if key != "binding_limit" else capacity.binding_limit or None for key in JSON_KEYS}))
        return
    total = chosen_gpu.total_memory_bytes / 2**30 if gpu_gib is None else gpu_gib
    title = f"{chosen_llm.name} on {tp} x {chosen_gpu.name}" if tp > 1 else f"{chosen_llm.name} on {chosen_gpu.name}"
    _print_capacity(capacity, title, total, memory_fraction)


def _print_capacity(capacity: KvCapacity, title: str, total_gib: float, memory_fraction: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title}, per GPU", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for label, gib, note in (
        ("Usable memory", total_gib * memory_fraction, f"{memory_fraction:g} of {total_gib:.2f} GiB"),
        ("Weights", -capacity.weights_gib, ""),
        ("Activation peak", -capacity.activation_gib, ""),
        ("Beside torch", -capacity.non_torch_gib, "context, communicators"),
        ("KV cache", capacity.kv_gib, f"{capacity.kv_bytes_per_token / 1024:g} KiB a token"),
    ):
        table.add_row(label, f"{gib:,.2f} GiB", note)
    if capacity.kv_gib > 0:
        table.add_row("KV blocks", f"{capacity.blocks:,}", f"{capacity.block_tokens} tokens each, one reserved")
        table.add_row("KV tokens", f"{capacity.kv_tokens:,}", "")
        table.add_row("Sequences of maximum length", f"{capacity.max_concurrency:.2f}", "")
    interactive = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if interactive else 100, force_terminal=None if interactive else False, emoji=False)
    console.print(table)
    verdict = "fits" if capacity.fits else f"does not fit - {capacity.binding_limit}"
    console.print(f"\n{verdict}", highlight=False, soft_wrap=True)


def tables() -> dict[str, tuple[Row, Callable[[], Iterable[Row]]]]:
    """Return, for each kind that this room lists, its header and a function that reads its rows."""
    return {
        "gpus": (("gpu", "memory GiB", "TB/s", "bf16 TFLOPS", "fp8 TFLOPS", "link", "$/h"), _gpu_rows),
        "llms": (("llm", "parameters", "active", "weights", "KV KiB/token", "max length"), _llm_rows),
        "latency-models": (("name", "what it is"), _latency_rows),
    }


def _gpu_rows() -> Iterable[Row]:
    from serving.catalog import load_gpu, names

    for name in names("gpus"):
        gpu = load_gpu(name)
        fp8 = f"{gpu.flops['fp8'] / 1e12:.0f}" if "fp8" in gpu.flops else "-"
        price = f"{gpu.price_usd_per_h:.2f}" if gpu.price_usd_per_h else "-"
        yield (name, f"{gpu.total_memory_bytes / 2**30:.1f}", f"{gpu.memory_bytes_per_s / 1e12:.3f}", f"{gpu.flops['bf16'] / 1e12:.0f}",
               fp8, gpu.link.kind, price)  # fmt: skip


def _llm_rows() -> Iterable[Row]:
    from serving.catalog import load_llm, names

    for name in names("llms"):
        llm = load_llm(name)
        count = llm.parameters()
        yield (name, f"{count.total / 1e9:.2f}B", f"{count.active / 1e9:.2f}B", llm.weight_dtype,
               f"{llm.kv_bytes_per_token() / 1024:g}", str(llm.max_model_len))  # fmt: skip


def _latency_rows() -> Iterable[Row]:
    from hwmodels.latency import MODELS

    return ((name, line) for name, (_, line) in sorted(MODELS.items()))
