"""Case M6: KV entries of half the size hold twice the tokens; at fixed low concurrency the answer comes hardly earlier."""

from __future__ import annotations

from serving.scenario import load
from sim.fleet import resolve
from sim.run import simulate


def run(dtype: str, users: int, requests: int, **more: str) -> dict:
    overrides = [f"kv_cache.dtype={dtype}", f"workload.arrivals.users={users}", f"workload.requests={requests}", *more.values()]
    return simulate(load("kv-fp8", overrides)).summary


def test_the_pool_doubles_and_each_dtype_fills_the_same_bytes():
    blocks = {dtype: resolve(load("kv-fp8", [f"kv_cache.dtype={dtype}"])).capacity.blocks for dtype in ("bf16", "fp8", "int4")}
    assert blocks["fp8"] - 2 * blocks["bf16"] in (0, 1)
    assert blocks["int4"] - 4 * blocks["bf16"] in range(4)


def test_at_low_concurrency_the_difference_is_a_few_per_cent_and_not_half():
    narrow, wide = run("fp8", 8, 120), run("bf16", 8, 120)
    for key in ("e2e_s", "tpot_s"):
        assert 0.0 < 1 - narrow[key]["mean"] / wide[key]["mean"] < 0.08, key


def test_where_the_pool_binds_it_pays():
    seats = {"seats": "policy.batching.max_batch_seqs=256", "blocks": "kv_cache.memory_fraction=0.32"}
    narrow, wide = run("fp8", 192, 500, **seats), run("bf16", 192, 500, **seats)
    assert narrow["output_tokens_per_s"] > 1.1 * wide["output_tokens_per_s"]
