"""Checks of requests and seals of answers: what they cost, where it shows, and that nothing is paid where nobody asks."""

from __future__ import annotations

import numpy as np
import pytest

from hwmodels.sealed import Sealed
from serving.errors import InputError
from serving.plan import StepShape
from serving.scenario import from_mapping, load
from sim.run import simulate
from validate.explain import CAUSES, attribute
from validate.run_data import read_run

RARE = {"requests": 12, "arrivals": {"process": "constant", "rate_rps": 0.2}, "prompt_tokens": {"dist": "uniform", "min": 100, "max": 900}, "output_tokens": {"dist": "constant", "value": 9}}
BUSY = RARE | {"requests": 150, "arrivals": {"process": "poisson", "rate_rps": 30.0}}


def scenario(integrity: dict | None, workload: dict = RARE, **changes: object):
    asked = {} if integrity is None else {"integrity": integrity}
    return from_mapping({"name": "checked", "llm": "qwen2.5-0.5b", "max_model_len": 4096, "cluster": {"gpu": "h100-sxm"}, "workload": workload, **asked, **changes})


def constant(seconds: float) -> dict:
    return {"dist": "constant", "value": seconds}


class Flat:
    """A second a step."""

    def step_s(self, shape):
        return 1.0

    def run_s(self, shape, steps):
        return [1.0] * steps


def test_a_step_pays_once_and_for_each_sequence_that_gets_a_token():
    sealed = Sealed(Flat(), step_s=0.25, token_s=0.5)
    decode = StepShape((), 3, 30, 3)
    assert sealed.step_s(decode) == 1.0 + 0.25 + 1.5 and sealed.run_s(decode, 3) == [sealed.step_s(decode)] * 3
    mixed = StepShape(((64, 0), (8, 56)), 3, 30, 4)
    assert sealed.step_s(mixed) == 1.0 + 0.25 + 0.5 * 4, "three decodes and the prompt that ends here; the other gets none"


def test_a_check_delays_the_first_token_by_its_time_and_by_the_length_of_the_prompt(tmp_path):
    for name, asked in (("plain", None), ("checked", {"request_s": constant(0.125), "prompt_token_s": 1e-4})):
        simulate(scenario(asked), out=tmp_path / name)
    plain, checked = (read_run(tmp_path / name) for name in ("plain", "checked"))
    expected = 0.125 + 1e-4 * plain.requests["prompt_tokens"]
    assert checked.latency_s("ttft_s") - plain.latency_s("ttft_s") == pytest.approx(expected, abs=1e-9)
    assert checked.latency_s("tpot_s") == pytest.approx(plain.latency_s("tpot_s"))


def test_seals_are_in_every_token_and_checks_are_not():
    plain, sealed = (simulate(scenario(asked)).summary for asked in (None, {"step_s": 0.002, "token_s": 0.001}))
    assert sealed["tpot_s"]["mean"] - plain["tpot_s"]["mean"] == pytest.approx(0.003, rel=1e-6)
    assert sealed["ttft_s"]["mean"] - plain["ttft_s"]["mean"] == pytest.approx(0.003, rel=1e-6)
    assert "stages" not in sealed and sealed["load_factor"] is not None, "no request waits for anything"


def test_the_explanation_names_checks_and_the_wait_for_them_and_still_adds_up(tmp_path):
    simulate(scenario({"request_s": constant(0.03)}, BUSY, stages=[{"name": "features", "service_s": constant(0.01), "servers": 4}]), out=tmp_path)
    run = read_run(tmp_path)
    found = attribute(run, "ttft_s")
    mine = found.parts_s[:, CAUSES.index("integrity")]
    rows = run.stages["stage"] == "integrity"
    order = np.argsort(run.stages["request_id"][rows])
    assert mine == pytest.approx((run.stages["ended_s"] - run.stages["entered_s"])[rows][order])
    assert mine.min() >= 0.03 - 1e-12 and mine.max() > 0.06, "some waited for the one before"
    assert found.parts_s.sum(axis=1) == pytest.approx(found.whole_s)
    assert found.parts_s[:, CAUSES.index("stage")] == pytest.approx(0.01)


def test_one_worker_that_is_too_slow_is_what_users_wait_for():
    slow = ["workload.requests=400", "integrity.request_s.value=0.06"]
    one, four = (simulate(load("integrity", [*slow, f"integrity.workers={workers}"])).summary for workers in (1, 4))
    off = simulate(load("integrity", ["workload.requests=400", "integrity=null"]), saturated_rps=1.0).summary
    assert off["ttft_s"]["mean"] + 0.06 < four["ttft_s"]["mean"] < off["ttft_s"]["mean"] + 0.07
    assert one["ttft_s"]["mean"] > 2 * four["ttft_s"]["mean"] and one["stages"][-1]["wait_s"]["mean"] > 0.05


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({}, "costs nothing"),
        ({"request_s": constant(0.1), "workers": 0}, "workers"),
        ({"step_s": -1.0}, "step_s"),
        ({"request_s": constant(0.1), "token": 1.0}, "token_s"),
    ],
)
def test_mistakes_are_named(asked, match):
    with pytest.raises(InputError, match=match):
        scenario(asked)


def test_a_stage_may_not_take_the_name_of_the_check():
    with pytest.raises(InputError, match="is taken"):
        scenario(None, stages=[{"name": "integrity", "service_s": constant(0.1)}])
