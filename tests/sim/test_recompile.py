"""Steps by compiled plans: what a plan that does not fit costs, when it is made again, what is fused, and whose plans they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwmodels import latency
from hwmodels.compiled import Compiled, Compiler, SharedCache, boundaries
from serving.catalog import load_gpu, load_llm
from serving.errors import InputError
from serving.plan import StepShape
from serving.policies import load as load_policy
from serving.scenario import load
from sim.fleet import resolve
from sim.run import simulate

ROOFLINE = latency.build("roofline", {}, llm=load_llm("llama-3.1-8b"), gpu=load_gpu("h100-sxm"))
CACHE = SharedCache(50e6, 5.5e12)


class Facts:
    """A compiler by numbers: a tenth of a millisecond a token, fused to half of that, 12 to 47 ms to compile."""

    def dense_s(self, tokens):
        return 1e-4 * tokens

    def planned_s(self, tokens):
        return 0.5e-4 * tokens

    def recompile_s(self, tokens):
        return 0.012 + 0.035 * tokens / 1000


class Target:
    """What the plan does not touch takes 3 ms."""

    def step_s(self, shape):
        return 0.003 + 1e-4 * (shape.decodes + sum(new for new, _ in shape.chunks))


def compiled(policy: str, decode: int = 100, mixed: int = 500, **options) -> Compiled:
    return Compiled(Target(), Facts(), lambda: load_policy("recompile", policy, options), decode, mixed)


def decodes(count: int) -> StepShape:
    return StepShape((), count, count, count)


def prompt(tokens: int) -> StepShape:
    return StepShape(((tokens, 0),), 0, 0, 1)


def test_a_plan_too_large_pads_and_one_too_small_passes_again():
    model = compiled("static")
    assert [model.step_s(decodes(count)) for count in (1, 100, 101, 250)] == pytest.approx([0.003 + 0.005 * passes for passes in (1, 1, 2, 3)])
    assert model.step_s(prompt(501)) == pytest.approx(0.003 + 2 * 0.025), "steps with prompts have a plan of their own"
    assert model.decode.recompiles == model.mixed.recompiles == 0 and model.stalled_s == 0.0


def test_drift_waits_until_it_has_lasted_and_compiles_for_the_largest_step_it_met():
    model = compiled("drift", above_s=0.008, steps=3)
    sizes = [420, 580, 419, 581, 300, 200, 250, 250, 329, 331]
    stalls = []
    for size in sizes:
        before_s = model.stalled_s
        model.step_s(prompt(size))
        stalls.append(model.stalled_s - before_s)
    # 420 and 580 are 8 ms off, not more; 419 and 581 are, 300 makes three on end, and 581 was the largest; 200, 250, 250 drift from that
    assert [index for index, stall in enumerate(stalls) if stall] == [4, 7]
    assert stalls[4] == pytest.approx(0.012 + 0.035 * 0.581) and stalls[7] == pytest.approx(0.012 + 0.035 * 0.25)
    assert model.mixed.tokens == 250 and model.mixed.recompiles == 2 and model.decode.recompiles == 0
    assert model.mixed.drifted_steps == 1, "329 is within 8 ms of 250, 331 is not"


def test_one_odd_step_changes_nothing_unless_every_step_must_fit():
    sizes = [500, 900, 500, 900, 500]
    waits, always = compiled("drift", steps=2), compiled("always")
    for size in sizes:
        waits.step_s(prompt(size))
        always.step_s(prompt(size))
    assert waits.mixed.recompiles == 0 and always.mixed.recompiles == 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.sampled_from(["static", "always", "drift"]))
def test_time_is_that_of_the_plan_in_force_and_stalls_add_up(sizes, policy):
    model, total_s, floor_s = compiled(policy), 0.0, 0.0
    for size in sizes:
        total_s += model.step_s(prompt(size))
        passes = -(-size // model.mixed.tokens)
        total_s -= 0.003 + passes * Facts().planned_s(model.mixed.tokens)
        floor_s += Facts().planned_s(size)
    assert total_s == pytest.approx(model.stalled_s, abs=1e-9)
    assert (model.stalled_s > 0) == (model.mixed.recompiles > 0)
    if policy == "always":
        assert model.mixed.tokens == sizes[-1], "every step ran by a plan of its size"


def test_boundaries_fuse_while_the_intermediate_fits_and_handing_over_is_cheap():
    fitting = [all(one.fuses(CACHE) for one in boundaries(ROOFLINE.operators, tokens, CACHE)) for tokens in (8, 256, 512, 1024, 2048)]
    assert fitting == [True, True, True, False, False]
    activation = boundaries(ROOFLINE.operators, 512, CACHE)[0]
    assert activation.intermediate_bytes == 512 * 3 * 14336 * 2
    assert not activation.fuses(CACHE._replace(cross_share=activation.cross_s / activation.compute_s))
    assert activation.fuses(CACHE._replace(size_bytes=activation.intermediate_bytes)) and not activation.fuses(CACHE._replace(size_bytes=activation.intermediate_bytes - 1))


def test_fused_work_is_cheaper_by_what_no_longer_crosses_memory_and_never_below_the_products():
    compiler = Compiler(ROOFLINE.operators, CACHE, (0.012, 0.047), 2048)
    plain = Compiler(ROOFLINE.operators, CACHE._replace(cross_share=0.0), (0.012, 0.047), 2048)
    for tokens in (1, 64, 512, 2048):
        costs = ROOFLINE.operators.dense(tokens)
        products = sum(cost.seconds for name, cost in costs.items() if name not in ("activation", "rope_and_kv_write"))
        assert products < compiler.planned_s(tokens) <= plain.planned_s(tokens) == compiler.dense_s(tokens)
    assert compiler.planned_s(512) < compiler.dense_s(512)
    assert [compiler.recompile_s(tokens) for tokens in (0, 2048, 9999)] == pytest.approx([0.012, 0.047, 0.047])


def run(*overrides: str, **options) -> dict:
    return simulate(load("recompile", ["workload.requests=500", *overrides]), saturated_rps=1.0, **options).summary


def test_drift_beats_the_worst_case_plan_and_compiling_all_the_time():
    drift, static, always = (run(f"compilation.policy={name}") for name in ("drift", "static", "always"))
    assert drift["tpot_s"]["mean"] < 0.9 * static["tpot_s"]["mean"] < 0.9 * always["tpot_s"]["mean"]
    assert 0 < drift["compilation"]["mixed"]["recompiles"] * 10 < always["compilation"]["mixed"]["recompiles"]
    assert static["compilation"]["stalled_s"] == 0.0


def test_every_replica_has_plans_of_its_own_and_one_event_a_step_changes_nothing():
    fast, stepwise = run("cluster.replicas=2"), run("cluster.replicas=2", stepwise=True)
    assert {**fast, "events": 0} == {**stepwise, "events": 0}
    audited = run("cluster.replicas=2", audit=0.3)
    assert audited == fast
    again = simulate(load("recompile", ["workload.requests=500", "cluster.replicas=2"])).summary
    assert again["compilation"] == fast["compilation"], "measuring what saturates the fleet left no plan behind"
    assert resolve(load("recompile")).latency.mixed.tokens == 2048


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["compilation.recompile_s=[0.05, 0.01]"], "smallest"),
        (["compilation.policy={name: drift, above_s: -1}"], "above_s"),
        (["compilation.policy=drifting"], "no recompile policy"),
        (["llm=mixtral-8x7b", "cluster.tensor_parallel=4"], "experts"),
        (["policy.batching.max_in_flight=2"], "one plan in flight"),
        (["integrity={step_s: 0.001}"], "integrity"),
    ],
)
def test_mistakes_are_named(overrides, match):
    with pytest.raises(InputError, match=match):
        resolve(load("recompile", overrides))
