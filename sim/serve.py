"""``twinserve serve``: the OpenAI surface over the simulator in real time."""

from __future__ import annotations

from typing import Annotated

import typer

from serving.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("serve")(serve)


def serve(
    scenario: Annotated[str, typer.Argument(help="A YAML file, or a name from `twinserve list scenarios`; its arrivals are not used.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override one key; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the lengths of answers, instead of the scenario's.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    speed: Annotated[float, typer.Option(metavar="X", help="Simulated seconds per second.")] = 1.0,
    max_waiting: Annotated[int | None, typer.Option(metavar="N", help="Tell clients to come back while so many wait for their first token.")] = None,
    drain_s: Annotated[float, typer.Option(metavar="S", help="When stopped, let requests finish for so long.")] = 30.0,
) -> None:
    """Serve completions over the simulator: a scenario's fleet answers with placeholder text, at the times it would."""
    from serving.scenario import load

    if drain_s < 0:
        raise InputError("--drain-s", f"must not be negative, got {drain_s:g}")
    loaded = load(scenario, overrides or (), seed)
    try:
        from serving.http import server
        from serving.http.app import build_app
    except ImportError as missing:
        raise InputError("serve", f"needs the package '{missing.name}'", "pip install 'twinserve[serve]'") from None
    from serving.http.service import Limits
    from sim.live import SimBackend

    backend = SimBackend(loaded, speed=speed)
    listening = server.listen(host, port)
    app = build_app(backend, Limits(max_waiting=max_waiting), drain_s=drain_s)
    server.serve(app, listening, drain_s=drain_s, what=f"{backend.llm} (simulated, {len(backend.cluster.replicas)} replicas)")
