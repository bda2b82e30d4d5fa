"""``twinserve engine serve``: the OpenAI surface over the engine."""

from __future__ import annotations

from engine.cli import Adapters, Attention, Device, Dtype, Eager, Overrides, Scenario, Seed, Threads, Weights
from serving.errors import InputError
from serving.http.command import Drain, Host, MaxWaiting, Port, TokenCache, serve_backend


def serve(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = None,
    adapters: Adapters = None,
    attention: Attention = None,
    eager: Eager = False,
    threads: Threads = 1,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_waiting: MaxWaiting = None,
    drain_s: Drain = 30.0,
    token_cache_mib: TokenCache = None,
) -> None:
    """Serve completions with the real engine, under a scenario's policies; its workload is not used."""
    from serving.scenario import load

    loaded = load(scenario, overrides or (), seed)
    if loaded.cluster.replicas != 1:
        raise InputError("cluster.replicas", f"one engine is one replica, not {loaded.cluster.replicas}", "set it to 1")

    def build() -> tuple:
        from engine.build import Choices, build_engine
        from engine.live import EngineBackend
        from engine.tokenizer import end_tokens, load_tokenizer

        engine = build_engine(loaded, Choices(device, dtype, weights, attention, eager, threads, adapters))
        backend = EngineBackend(loaded, engine, load_tokenizer(weights, engine.vocab), end_tokens=end_tokens(weights))
        return backend, f"{backend.llm} ({engine.device})"

    serve_backend(build, host=host, port=port, max_waiting=max_waiting, drain_s=drain_s, token_cache_mib=token_cache_mib)
