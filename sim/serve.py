"""``twinserve serve``: the OpenAI surface over the simulator in real time."""

from __future__ import annotations

from typing import Annotated

import typer

from serving.errors import InputError
from serving.http.command import Drain, Host, MaxWaiting, Port, TokenCache, serve_backend


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("serve")(serve)


def serve(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or a name from `twinserve list scenarios`; its arrivals are not used.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the lengths of answers, instead of the scenario's.")] = None,
    speed: Annotated[float, typer.Option(metavar="X", help="Simulated seconds per second.")] = 1.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_waiting: MaxWaiting = None,
    drain_s: Drain = 30.0,
    token_cache_mib: TokenCache = None,
) -> None:
    """Serve completions over the simulator: a scenario's fleet answers with placeholder text, at the times it would."""
    from serving.scenario import load

    loaded = load(scenario, overrides or (), seed)
    if not 0 < speed < float("inf"):
        raise InputError("--speed", f"{speed:g} is no number above 0")

    def build() -> tuple:
        from sim.live import SimBackend

        backend = SimBackend(loaded, speed=speed)
        return backend, f"{backend.llm} (simulated, {backend.fleet})"

    serve_backend(build, host=host, port=port, max_waiting=max_waiting, drain_s=drain_s, token_cache_mib=token_cache_mib)
