"""Pages that go to host memory and come back: the same text whatever the pool, decided by the simulator's own tiers and reload policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")

from stub_plans import CPU, TINY, runner
from test_loop import scenario, serve, stub

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.host_pages import HostPages
from engine.kv_cache import KvCache
from engine.run import serve_scenario
from engine.stub_runner import StubRunner
from serving.kv_tiers import Move
from serving.scenario import load
from validate.parity import parity

SMALL, ROOMY = 34, 800
TALKATIVE = replace(TINY, vocab=1009)


def tiers(*gib: float) -> list[dict]:
    return [{"name": f"tier{index}", "gib": size, "read_bytes_per_s": 1e9} for index, size in enumerate(gib)]


HOT = {"name": "heat", "decay_uses": 30, "pin_at": 4}


def with_tiers(spec, *gib: float, reload: str = "always", eviction: str | dict = "lru"):
    cache = {**spec.kv_cache.model_dump(), "tiers": tiers(*gib), "eviction": eviction}
    return type(spec).model_validate({**spec.resolved(), "kv_cache": cache, "policy": {**spec.resolved()["policy"], "reload": reload}})


def moves_of(spec, blocks: int = SMALL):
    counted: dict[str, int] = {"out": 0, "in": 0, "forget": 0}
    engine = stub()
    move = StubRunner._move

    def count(kind, key, block):
        counted[kind] += 1
        move(engine, kind, key, block)

    engine._move = count
    return serve(spec, engine), counted


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("gib", [(0.004,), (0.0005, 0.002), (0.0003,)])
@pytest.mark.parametrize("eviction", ["lru", {"name": "heat", "decay_uses": None}, HOT], ids=["lru", "heat", "decay and pins"])
def test_whatever_moves_the_text_is_that_of_a_roomy_pool(in_flight, gib, eviction):
    _, expected = serve(scenario(ROOMY, in_flight))
    spec = with_tiers(scenario(SMALL, in_flight), *gib, eviction=eviction)
    (summary, said), counted = moves_of(spec)
    assert said == expected
    assert summary["preemptions"] > 0 and counted["out"] > 0
    assert counted["in"] > 0


def test_never_reloading_moves_nothing_in():
    (_, said), counted = moves_of(with_tiers(scenario(SMALL), 0.004, reload="never"))
    assert counted["in"] == 0 and counted["out"] > 0
    assert said == serve(scenario(ROOMY))[1]


@pytest.mark.parametrize("narrow", [None, "fp8", "int4"])
def test_a_page_comes_back_bit_for_bit(narrow):
    cache = KvCache(TINY, blocks=6, block_tokens=4, dtype=torch.float32, device=CPU, narrow=narrow)
    for pages in cache.keys + cache.values:
        if narrow is None:
            pages.normal_()
        else:
            pages.store(torch.randn(24, *pages.shape[2:]), torch.arange(24))
    before = [pages.index_select(0, torch.tensor([2, 3])).clone() for pages in cache.keys + cache.values]
    host = HostPages(cache)
    host.apply([Move("out", "a", 2), Move("out", "b", 3), Move("in", "a", 5), Move("in", "b", 2), Move("forget", "a", 0), Move("out", "c", 5)])
    after = [pages.index_select(0, torch.tensor([5, 2])) for pages in cache.keys + cache.values]
    assert all(torch.equal(was, now) for was, now in zip(before, after))
    assert (host.copied_out, host.copied_in) == (3, 2)
    with pytest.raises(KeyError):
        host.apply([Move("in", "a", 1)])


@pytest.mark.parametrize("eviction", ["lru", "{name: heat, decay_uses: 5, pin_at: 2}"])
def test_the_real_engine_swaps_and_its_run_has_decision_parity(tmp_path, eviction):
    overrides = [f"kv_cache.eviction={eviction}", "workload.requests=16", "workload.arrivals=all_at_once", "kv_cache.blocks=22", "kv_cache.tiers=[{name: host, gib: 0.05, read_bytes_per_s: 1.0e+10}]", "cluster.gpu=data/epyc-one-thread.yaml"]
    swapping = load("engine-tiny", overrides)
    engine = build_engine(swapping, Choices(device="cpu", attention="torch"))
    result = serve_scenario(swapping, engine, ReportedClock(), out=tmp_path / "run")
    assert result.summary["preemptions"] > 0
    assert engine.runner.host_pages.copied_in > 0
    assert parity(tmp_path / "run").differing_plans == 0


def test_swapped_pages_give_the_tokens_of_a_roomy_pool_on_the_real_network():
    spec = with_tiers(scenario(SMALL, requests=16), 0.004)
    said = [serve(one, runner(TALKATIVE, blocks=blocks, max_seqs=16, max_batch_tokens=64))[1] for one, blocks in ((scenario(ROOMY, requests=16), ROOMY), (spec, SMALL))]
    assert said[0] == said[1] and sum(len(text) for _, text in said[0].values()) > 100
