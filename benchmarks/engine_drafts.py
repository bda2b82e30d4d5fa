"""What drafts bring and cost on the real engine, by batch size, beside what the simulator says of the same scenario.

    python benchmarks/engine_drafts.py [--users 1 4 12] [--drafts 3] [--requests 36] [--weights DIR --text FILE]

``engine-tiny`` on one CPU thread, on the normalised clock, as a closed loop: so many users, each with one request at a time. For each proposer: the
share of drafts accepted, the tokens of a decode and step, how much longer a step of decodes takes than one without drafts (the length from
which it pays), and the time per output token against the run without. The simulator is given the engine's acceptance, drafts that cost
what their layers do, and the fitted latency model of this network; it knows nothing of how texts repeat, so it drafts always.

With ``--weights`` and ``--text`` a real network goes on from pieces of a text instead, all users at once; the simulator has no prices for it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.accounts import Drafts
from engine.build import Choices, build_engine, normalised
from engine.measure import spare_the_collector
from engine.messages import Step, Submission
from engine.run import build_loop, serve_scenario
from serving.records import Run, open_run
from serving.request import Request
from serving.scenario import Scenario, load
from sim.run import simulate

PROPOSERS = {"prompt_lookup": ("{name: prompt_lookup}", 0.0), "layers": ("{name: layers, layers: 1}", 0.25)}  # with a draft's share of a plain step
REAL = {"prompt_lookup": "{name: prompt_lookup}", "layers": "{name: layers, layers: 10}"}


class Figures(NamedTuple):
    """``step_ms`` is that of a step in which everybody decodes and nobody is read."""

    step_ms: float
    tpot_ms: float
    acceptance: float | None = None
    length: float | None = None


def scenario(users: int, requests: int, *overrides: str) -> Scenario:
    """The closed loop on a pool that never runs short."""
    return load("engine-tiny", [
        f"workload.arrivals={{process: closed_loop, users: {users}}}", f"workload.requests={requests}", "kv_cache.blocks=400",
        "workload.output_tokens={dist: constant, value: 48}", *overrides,
    ])  # fmt: skip


def speculation(proposer: str, drafts: int, acceptance: float) -> str:
    """An override."""
    name, share = PROPOSERS[proposer]
    return f"speculation={{policy: {{name: fixed, tokens: {drafts}}}, acceptance: {acceptance}, draft_step_fraction: {share}, proposer: {name}}}"


def measured(spec: Scenario, users: int) -> Figures:
    """Serve it on the engine."""
    engine, clock = normalised(build_engine(spec, Choices(device="cpu")), 0.005)
    with tempfile.TemporaryDirectory() as folder, spare_the_collector():
        summary = serve_scenario(spec, engine, clock, out=Path(folder) / "run").summary
        drafts = summary.get("speculation") or {}
        return Figures(_step_ms(open_run(Path(folder) / "run"), users), summary["tpot_s"]["mean"] * 1e3, drafts.get("acceptance"), drafts.get("acceptance_length"))


class Watch:
    """Observes a loop: seconds of steps in which all of ``users`` decode and nobody is read, and the drafts of all steps."""

    def __init__(self, users: int) -> None:
        self.durations_s: list[float] = []
        self.drafts = Drafts()
        self._users = users

    def submitted(self, request_id: int) -> None:
        """Not of interest."""

    aborted = submitted

    def planned(self, plan: object) -> None:
        """Not of interest."""

    left = planned

    def stepped(self, step: Step) -> None:
        """Take it in."""
        if step.plan.accepted:
            self.drafts.note(step)
        if step.plan.decodes == self._users and not step.plan.chunks:
            self.durations_s.append(step.duration_s)


def on_text(weights: Path, pieces: list[list[int]], output_tokens: int, *overrides: str) -> tuple[float, float, dict]:
    """Continue ``pieces``, all at once: ms of a step of decodes, ms a token and user from first to last, and the report on drafts."""
    longest = len(pieces[0]) + output_tokens
    spec = load("engine-tiny", ["llm=smollm2-135m", f"max_model_len={longest}", f"kv_cache.blocks={2 + len(pieces) * (longest // 16 + 2)}",
                                "policy.batching.max_batch_tokens=512", *overrides])  # fmt: skip
    engine, clock = normalised(build_engine(spec, Choices(device="cpu", weights=weights)), 0.05)
    watch = Watch(len(pieces))
    loop = build_loop(spec, engine, clock, observer=watch)
    for one, piece in enumerate(pieces):
        loop.env.at(0.0, lambda _, one=one, piece=piece: loop.submit_prompt(Submission(Request(one, 0.0, len(piece), output_tokens), piece, output_tokens)))
    with spare_the_collector():
        loop.run()
    seconds = sum(watch.durations_s)
    report = watch.drafts.report()
    return 1e3 * seconds / len(watch.durations_s), 1e3 * seconds / len(watch.durations_s) / (report["acceptance_length"] or 1.0), report


def real_network(weights: Path, text: Path, users: list[int], drafts: int) -> None:
    """Print a line a batch size and proposer."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(weights / "tokenizer.json")).encode(text.read_text(encoding="utf-8")).ids
    print(f"{'':<24}{'drafts':>7}{'accepted':>9}{'tokens':>8}{'step cost':>10}{'ms a token':>11}{'plain':>7}{'ratio':>7}")
    for count in users:
        pieces = [ids[192 * one : 192 * one + 160] for one in range(count)]
        plain_ms = on_text(weights, pieces, 64)[0]
        for proposer in REAL:
            step_ms, token_ms, report = on_text(weights, pieces, 64, f"speculation={{policy: {{name: fixed, tokens: {drafts}}}, acceptance: 0.5, proposer: {REAL[proposer]}}}")
            print(
                f"{count:>3} users, {proposer:<14}{report['draft_tokens']:>7.2f}{report['acceptance']:>9.1%}{report['acceptance_length']:>8.2f}"
                f"{step_ms / plain_ms:>10.2f}{token_ms:>11.1f}{plain_ms:>7.1f}{token_ms / plain_ms:>7.2f}",
                flush=True,
            )  # fmt: skip


def _step_ms(run: Run, users: int) -> float:
    steps = run.steps
    return float(steps["duration_s"][(steps["decode_seqs"] == users) & (steps["prefill_tokens"] == 0)].mean() * 1e3)


def main() -> None:
    """Print a line a batch size and proposer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, nargs="*", default=[1, 4, 12])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--requests", type=int, default=36)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--text", type=Path)
    arguments = parser.parse_args()
    if arguments.weights is not None:
        real_network(arguments.weights, arguments.text, arguments.users, arguments.drafts)
        return
    print(f"{'':<24}{'accepted':>9}{'tokens':>8}{'step cost':>10}{'sim':>6}{'TPOT ms':>9}{'plain':>7}{'ratio':>7}{'sim':>6}")
    for users in arguments.users:
        requests = max(8, min(arguments.requests, 6 * users))
        plain = measured(scenario(users, requests), users)
        said = simulate(scenario(users, requests)).summary["tpot_s"]["mean"]
        for proposer in PROPOSERS:
            real = measured(scenario(users, requests, speculation(proposer, arguments.drafts, 0.0)), users)
            summary = simulate(scenario(users, requests, speculation(proposer, arguments.drafts, real.acceptance))).summary
            print(
                f"{users:>3} users, {proposer:<14}{real.acceptance:>9.1%}{real.length:>8.2f}{real.step_ms / plain.step_ms:>10.2f}"
                f"{summary['speculation']['step_cost_ratio']:>6.2f}{real.tpot_ms:>9.2f}{plain.tpot_ms:>7.2f}{real.tpot_ms / plain.tpot_ms:>7.2f}"
                f"{summary['tpot_s']['mean'] / said:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
