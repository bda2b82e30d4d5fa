"""LoRA adapters in the engine: merged weights say the same, whoever shares the batch and whatever the slots; the kernel; case S12; PEFT's files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("triton", reason="the engine's extra is not installed")

from safetensors.torch import save_file
from stub_plans import CPU, MOE, TINY, record_logits, runner
from test_loop import BURST, SHARED, scenario, serve, stub

from engine.build import Choices, build_engine
from engine.clocks import ReportedClock
from engine.kernels import chosen, reference
from engine.loader import random_weights
from engine.lora.adapter import PARTS, load_adapter, matrices, random_adapter
from engine.lora.residents import Residents
from engine.lora.slots import AdapterStore, LoraSlots
from engine.run import Engine, serve_scenario
from engine.runner import Runner, RunnerOptions
from engine.step import SequenceInput, StepInput
from serving.adapters import AdapterSlots
from serving.errors import InputError
from serving.policies import load as load_policy
from serving.request import Request
from serving.scenario import load
from validate.parity import parity
from validate.rerun import differences

LARGE = replace(TINY, vocab=1009)
RANK = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [9, 37])
@pytest.mark.parametrize(("widths", "inputs", "rank"), [((40,), 24, 4), ((70, 33, 33), 80, 16), ((50, 50), 17, 3)])
def test_the_kernel_and_the_reference_add_what_each_rows_adapter_makes(widths, inputs, rank, rows, dtype):
    g = torch.Generator().manual_seed(rank)
    slots, outputs = 5, sum(widths)
    x = torch.randn(rows, inputs + 3, generator=g).to(dtype)[:, :inputs]  # rows with a stride of their own
    y = torch.randn(rows, outputs, generator=g).to(dtype)
    a = torch.randn(slots, len(widths) * rank, inputs, generator=g).to(dtype)
    b = torch.randn(slots, outputs, rank, generator=g).to(dtype)
    adapters = torch.randint(-1, slots, (rows,), generator=g, dtype=torch.int32)
    adapters[16:32] = 3  # one tile of one adapter, as of a prompt
    expected = y.double()
    for row, slot in enumerate(adapters.tolist()):
        first = 0
        for part, width in enumerate(widths if slot >= 0 else ()):
            low = a[slot, part * rank : (part + 1) * rank].double() @ x[row].double()
            expected[row, first : first + width] += b[slot, first : first + width].double() @ low
            first += width
    for module in (reference, chosen):
        found = y.clone()
        module.add_adapters(found, x, a, b, widths, adapters)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (2e-6 if dtype == torch.float32 else 1.2e-2), module
        assert torch.equal(found[adapters < 0], y[adapters < 0])


def merged(weights, adapter):
    """The same network with an adapter's products added to its matrices."""
    weights = copy.deepcopy(weights)
    for layer, lows in zip(weights.layers, adapter):
        for key, low in lows.items():
            widths = matrices(LARGE)[key].widths
            parts = zip(low.b.split(widths), low.a.split(low.b.shape[1]))
            getattr(layer, key).add_(torch.cat([b @ a for b, a in parts]))
    return weights


def adapted_runner(slots: int, apply=reference.add_adapters, weights=None, **options) -> Runner:
    weights = weights or random_weights(LARGE, 3, device=CPU, dtype=torch.float32)
    store = AdapterStore(LARGE, RANK, folder=None, seed=9)
    held = LoraSlots(LARGE, slots, RANK, store, apply, dtype=torch.float32, device=CPU)
    sizes = {"blocks": 64, "block_tokens": 4, "max_seqs": 16, "max_batch_tokens": 64} | options
    return Runner(LARGE, weights, RunnerOptions(**sizes), lora=held)


@pytest.mark.parametrize("apply", [reference.add_adapters, chosen.add_adapters], ids=["torch", "triton"])
def test_a_mixed_batch_gives_the_logits_of_merged_weights(apply):
    names, text = ["", "A", "B", "A"], [4, 9, 2, 7, 7, 1]
    engine = adapted_runner(2, apply)
    rows = record_logits(engine)
    slot = {"": -1, "A": 1, "B": 0}
    prompts = [SequenceInput(one, text, 0, [1 + 2 * one, 2 + 2 * one], 1, adapter=slot[name]) for one, name in enumerate(names)]
    engine.execute(StepInput(prompts, adapters=[(1, "A"), (0, "B")]))
    engine.execute(StepInput([SequenceInput(one, [5], 6, [1 + 2 * one, 2 + 2 * one], 1, adapter=slot[name]) for one, name in enumerate(names)]))
    weights = engine.decoder.weights
    for one, name in enumerate(names):
        plain = runner(LARGE, weights=merged(weights, random_adapter(LARGE, RANK, name, 9)) if name else weights)
        alone = record_logits(plain)
        plain.execute(StepInput([SequenceInput(0, text, 0, [1, 2])]))
        plain.execute(StepInput([SequenceInput(0, [5], 6, [1, 2])]))
        for together, single in zip(rows, alone):
            torch.testing.assert_close(together[one], single[0], atol=2e-5, rtol=1e-5)
    assert (rows[0][0] - rows[0][1]).abs().max() > 0.1 < (rows[0][1] - rows[0][2]).abs().max()
    torch.testing.assert_close(rows[0][1], rows[0][3])


def with_adapters(spec, slots: int, *, count: int = 4, share: float = 0.8, **options):
    workload = {**spec.resolved()["workload"], "adapters": {"count": count, "share": share}}
    return type(spec).model_validate({**spec.resolved(), "workload": workload, "adapters": {"slots": slots, "rank": RANK, **options}})


@pytest.fixture
def names(monkeypatch):
    """The adapter of each request that a loop was given."""
    seen: dict[int, str] = {}
    submit = "engine.loop.Loop.submit"
    from engine.loop import Loop

    plain = Loop.submit

    def noting(self, request, output_tokens):
        seen[request.request_id] = request.adapter
        plain(self, request, output_tokens)

    monkeypatch.setattr(submit, noting)
    return seen


def test_on_few_slots_and_a_small_pool_everybody_says_what_merged_weights_say(names):
    spec = with_adapters(scenario(blocks=30, requests=24, **BURST), 2)
    engine = adapted_runner(2, blocks=30, graph_sizes=(4,))
    summary, found = serve(spec, engine)
    asked = dict(names)
    assert summary["preemptions"] > 0 and summary["adapters"]["loads"] > 4 and len(set(asked.values())) == 5
    weights = engine.decoder.weights
    for name in sorted(set(asked.values())):
        network = merged(weights, random_adapter(LARGE, RANK, name, 9)) if name else weights
        _, expected = serve(scenario(blocks=400, requests=24, **BURST), runner(LARGE, weights=network, blocks=400, max_seqs=16, max_batch_tokens=64))
        mine = [one for one, other in asked.items() if other == name]
        assert {one: found[one] for one in mine} == {one: expected[one] for one in mine}, name


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("workload", [{}, SHARED], ids=["plain", "shared prefixes"])
def test_slots_decide_who_waits_and_never_what_is_said(workload, in_flight, tmp_path):
    _, expected = serve(with_adapters(scenario(blocks=2000, **workload), 4))
    for slots, policy in ((1, "lru"), (2, "least_wanted"), (3, "lru")):
        spec = with_adapters(scenario(blocks=34, max_in_flight=in_flight, **workload), slots, policy=policy, max_bypasses=3)
        summary, found = serve(spec)
        assert found == expected
        assert summary["preemptions"] > 0 and summary["adapters"]["loads"] > 4
        serve_scenario(spec, Engine(stub(), 34, 80, 1009, "stub"), ReportedClock(), out=tmp_path / "run")
        assert parity(tmp_path / "run").differing_plans == 0
        assert differences(tmp_path / "run", stepwise=True) == []


def test_drafts_and_adapters_together():
    spec = with_adapters(scenario(blocks=34), 2)
    drafting = type(spec).model_validate({**spec.resolved(), "speculation": {"policy": {"name": "fixed", "tokens": 3}, "acceptance": 0.5}})
    _, expected = serve(spec)
    summary, found = serve(drafting)
    assert found == expected and summary["speculation"]["steps"] > 0


def test_one_that_stays_keeps_its_place():
    slots = AdapterSlots(2, load_policy("adapters", "lru"), 9)
    residents = Residents(slots)
    slots.take("A", None), slots.take("B", None)
    assert residents.refresh() == [(0, "A"), (1, "B")]
    slots.give_back("A")
    slots.take("C", None)
    assert residents.refresh() == [(0, "C")]
    assert (residents.slot("B"), residents.slot("C"), residents.slot("")) == (1, 0, -1)
    with pytest.raises(KeyError):
        residents.slot("A")


def test_four_slots_take_all_but_the_requests_of_a_fifth_adapter():
    """Case S12, on the network."""
    from engine.messages import Submission
    from engine.run import build_loop

    spec = load("engine-tiny", ["kv_cache.blocks=200", "policy.batching.max_batch_seqs=32", "policy.batching.max_batch_tokens=400", "adapters={slots: 4, rank: 4}"])
    plans, left = [], []

    class Told:
        submitted = aborted = stepped = lambda self, one: None

        def planned(self, plan):
            plans.append([(seq.request.request_id, seq.request.adapter) for seq in plan.admitted])

        def left(self, one):
            left.append(one.status)

    loop = build_loop(spec, build_engine(spec, Choices(device="cpu")), ReportedClock(), observer=Told())
    queue = [*[""] * 3, "A1", "A3", "A2", "A4", *["A5"] * 4, "", "", "A1", "A2", "A3"]
    for one, name in enumerate(queue):
        loop.submit_prompt(Submission(Request(one, 0.0, 5, 6, adapter=name), [3, 1, 4, 1, 5], output_tokens=6))
    loop.run()
    assert len(plans[0]) == 12 and "A5" not in [name for _, name in plans[0]]
    assert [name for plan in plans[1:] for _, name in plan] == ["A5"] * 4
    assert left == ["length"] * 16
    loop.scheduler.check()


def write_peft(folder, shape, rank: int, *, alpha: int, skip: str = "", **config):
    """A folder as PEFT writes it, of random factors; returns them by tensor."""
    g, tensors = torch.Generator().manual_seed(7), {}
    for layer in range(shape.layers):
        for key, one in matrices(shape).items():
            for part, width in zip(PARTS[key], one.widths):
                place = "self_attn" if key in ("qkv", "output") else "mlp"
                stem = f"base_model.model.model.layers.{layer}.{place}.{part}_proj"
                if part != skip:
                    tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, one.inputs, generator=g)
                    tensors[f"{stem}.lora_B.weight"] = torch.randn(width, rank, generator=g)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **config}))
    return tensors


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_read_as_peft_wrote_it(tmp_path, rslora):
    tensors = write_peft(tmp_path / "A", TINY, 3, alpha=6, skip="up", use_rslora=rslora)
    scale = 6 / 3**0.5 if rslora else 2.0
    adapter = load_adapter(tmp_path / "A", TINY, 8)
    for layer, lows in enumerate(adapter):
        for key, low in lows.items():
            first = 0
            for at, (part, width) in enumerate(zip(PARTS[key], matrices(TINY)[key].widths)):
                found = low.b[first : first + width] @ low.a[at * 8 : (at + 1) * 8]
                stem = next((name[:-14] for name in tensors if f"layers.{layer}." in name and f".{part}_proj.lora_A" in name), None)
                expected = scale * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"] if part != "up" else torch.zeros_like(found)
                torch.testing.assert_close(found, expected)
                first += width


def test_files_that_are_no_adapter_of_the_network_are_refused(tmp_path):
    write_peft(tmp_path / "A", TINY, 4, alpha=4)
    with pytest.raises(InputError, match="of rank 4, the slots hold 2"):
        load_adapter(tmp_path / "A", TINY, 2)
    with pytest.raises(InputError, match="expected \\[64, 4\\]"):
        load_adapter(tmp_path / "A", replace(TINY, hidden=64), 4)
    with pytest.raises(InputError, match=r"no LoRA factor|no LoRA"):
        load_adapter(tmp_path / "A", replace(TINY, layers=1), 4)
    with pytest.raises(InputError, match="use_dora"):
        write_peft(tmp_path / "B", TINY, 4, alpha=4, use_dora=True)
        load_adapter(tmp_path / "B", TINY, 4)
    with pytest.raises(InputError, match="cannot be read"):
        load_adapter(tmp_path, TINY, 4)
    with pytest.raises(InputError, match="holds no adapter 'a'"):
        AdapterStore(TINY, 4, folder=tmp_path, seed=0, names=["A", "a"])
    with pytest.raises(InputError, match="dense networks"):
        AdapterStore(MOE, 4, folder=None, seed=0)


def test_a_scenario_with_adapters_from_a_folder_runs(tmp_path):
    overrides = ["workload.requests=8", "adapters={slots: 2, rank: 4}", "workload.adapters={count: 3}", "workload.arrivals=all_at_once"]
    spec = load("engine-tiny", overrides)
    from engine.architecture import from_llm
    from serving.catalog import load_llm

    for name in ("a1", "a2", "a3"):
        write_peft(tmp_path / "adapters" / name, from_llm(load_llm(spec.llm)), 2, alpha=2)
    engine = build_engine(spec, Choices(device="cpu", adapters=tmp_path / "adapters"))
    summary = serve_scenario(spec, engine, ReportedClock(), out=tmp_path / "run").summary
    assert summary["requests"]["completed"] == 8 and summary["adapters"]["loads"] >= 3
    assert parity(tmp_path / "run").differing_plans == 0
