"""What a run or a profile of the engine says on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from engine.measure import Measured, relative_half_width

LATENCIES = (("time to first token", "ttft_s"), ("time per output token", "tpot_s"), ("inter-token latency", "itl_s"), ("end to end", "e2e_s"))
STATISTICS = ("mean", "p50", "p90", "p99", "max")


def print_run(summary: Mapping[str, Any], device: str, file: IO[str]) -> None:
    """Print a run's summary: the same lines for the same summary."""
    requests = summary["requests"]
    print(f"{summary['scenario']} on {device}, seed {summary['seed']}", file=file)
    print(
        f"{requests['completed']} of {requests['arrived']} requests completed in {summary['duration_s']:.2f} s; {summary['steps']} steps, "
        f"{summary['preemptions']} preemptions, {requests['rejected']} rejected, {requests['failed']} failed",
        file=file,
    )
    print("\n" + f"{'ms':<24}" + "".join(f"{name:>10}" for name in STATISTICS), file=file)
    for label, key in LATENCIES:
        values = summary[key]
        cells = "".join("         -" if values[name] is None else f"{values[name] * 1e3:>10.1f}" for name in STATISTICS)
        print(f"{label:<24}{cells}", file=file)
    kv = summary["kv_utilisation"]
    rates = [("output tokens", summary["output_tokens_per_s"]), ("prompt tokens", summary["prompt_tokens_per_s"])]
    said = ", ".join(f"{value:.1f} {name} a second" for name, value in rates if value is not None)
    used = f"KV pool {kv['mean']:.0%} full on average, {kv['max']:.0%} at most" if kv["mean"] is not None else ""
    print("\n" + "; ".join(part for part in (said, used) if part), file=file)
    drafts = summary.get("speculation")
    if drafts and drafts["acceptance"] is not None:
        print(
            f"{drafts['draft_tokens']:.2f} drafts a decode, {drafts['acceptance']:.1%} of those reached accepted, "
            f"{drafts['acceptance_length']:.2f} tokens a decode and step",
            file=file,
        )


def print_profile(measured: Measured, target: float, file: IO[str]) -> None:
    """Print each case's mean and how well it is known."""
    wide = 0
    print(f"{'step':<28}{'repeats':>8}{'mean ms':>10}{'+-':>8}", file=file)
    for at, case in enumerate(measured.cases):
        values = measured.durations_s(at)
        width = relative_half_width(values)
        wide += not width <= target
        mean = f"{sum(values) / len(values) * 1e3:>10.2f}" if values else "         -"
        print(f"{case!s:<28}{len(values):>8}{mean}{f'{width:.1%}' if width < 10 else '-':>8}", file=file)
    print(f"{len(measured.cases) - wide} of {len(measured.cases)} steps known within {target:.0%}", file=file)
