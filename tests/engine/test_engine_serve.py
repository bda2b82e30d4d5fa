"""The engine behind HTTP: its own thread, one delivery a step, and nothing lost when clients, requests or the device fail."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the engine's extra is not installed")
pytest.importorskip("starlette", reason="the extra 'serve' is not installed")

from asgi import Call
from stub_plans import TINY, runner

import twinserve
from engine.live import EngineBackend
from engine.run import Engine
from engine.step import SequenceInput
from engine.stub_runner import StubRunner
from engine.tokenizer import ByteTokenizer, FolderTokenizer, end_tokens, load_tokenizer
from serving.errors import InputError
from serving.http.app import build_app
from serving.scenario import Scenario, from_mapping
from sim.live import SimBackend

VOCAB = 1009


def scenario(**parts) -> Scenario:
    plain = {
        "version": 1, "name": "live", "llm": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm"},
        "policy": {"batching": {"max_batch_tokens": 256, "max_batch_seqs": 64}},
        "workload": {"requests": 10, "arrivals": {"process": "poisson", "rate_rps": 1.0}, "prompt_tokens": 100, "output_tokens": 40},
    }  # fmt: skip
    return from_mapping({**plain, **parts})


def stubbed(step_s: float = 0.0005, blocks: int = 600, spec: Scenario | None = None, fault: Callable | None = None, **options) -> EngineBackend:
    """A backend whose steps take ``step_s`` and compute nothing, but check every block table."""

    def duration_s(batch) -> float:
        time.sleep(step_s)
        return step_s

    stub = StubRunner(16, duration_s, vocab=VOCAB, fault=fault)
    return EngineBackend(spec or scenario(), Engine(stub, blocks, 4096, VOCAB, "stub"), ByteTokenizer(VOCAB), **options)


def scene(backend: EngineBackend, act) -> None:
    async def play() -> None:
        app = build_app(backend, drain_s=0.0)
        async with app.router.lifespan_context(app):
            await act(app)

    asyncio.run(play())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(salt * 97 + position) % VOCAB for position in range(count)]


def all_free(backend: EngineBackend) -> bool:
    return backend.scheduler.pool.free == backend.scheduler.pool.total


def test_fifty_streams_at_once_in_a_pool_that_preempts():
    backend = stubbed(blocks=120)

    async def act(app) -> None:
        body = {"max_tokens": 30, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
        calls = [Call(app, "/v1/completions", {**body, "prompt": tokens(40 + index, index)}) for index in range(50)]
        together = [(await call.finished()).text() for call in calls]
        for index, call in enumerate(calls):
            assert call.events()[-2]["usage"] == {"prompt_tokens": 40 + index, "completion_tokens": 30, "total_tokens": 70 + index}
        alone = await Call(app, "/v1/completions", {**body, "stream": False, "prompt": tokens(40 + 7, 7)}).finished()
        assert alone.json()["choices"][0]["text"] == together[7]
        assert backend.stats()[0].preemptions > 0
        await until(lambda: all_free(backend))
        backend.scheduler.check()

    scene(backend, act)


def test_clients_that_hang_up_give_their_blocks_back():
    backend = stubbed()

    async def act(app) -> None:
        calls = [Call(app, "/v1/completions", {"prompt": tokens(60, index), "max_tokens": 2000, "stream": index % 2 == 0}) for index in range(10)]
        await calls[0].until(3)
        assert not all_free(backend)
        for call in calls:
            call.hang_up()
        await asyncio.gather(*(call.finished() for call in calls))
        await until(lambda: all_free(backend))
        assert backend.scheduler.running.count == 0
        backend.scheduler.check()

    scene(backend, act)


def test_a_request_whose_step_raises_fails_alone():
    def fault(sequence: SequenceInput) -> None:
        if sequence.start > 70:
            raise ValueError("a kernel's complaint")

    backend = stubbed(fault=fault)

    async def act(app) -> None:
        bad = Call(app, "/v1/completions", {"prompt": tokens(60), "max_tokens": 40, "stream": True})
        good = [Call(app, "/v1/completions", {"prompt": tokens(20, index), "max_tokens": 40, "stream": True}) for index in range(4)]
        await asyncio.gather(*(call.finished() for call in (bad, *good)))
        assert "a kernel's complaint" in bad.events()[-2]["error"]["message"] and len(bad.events()) == 12 + 2
        assert all(len(call.events()) == 41 and "error" not in call.events()[-2] for call in good)
        await until(lambda: all_free(backend))
        backend.scheduler.check()

    scene(backend, act)


def test_when_the_device_fails_everybody_is_told_and_the_next_are_served():
    broken: list[bool] = []

    def fault(sequence: SequenceInput) -> None:
        if broken:
            raise RuntimeError("the device is lost")

    backend = stubbed(fault=fault)

    async def act(app) -> None:
        calls = [Call(app, "/v1/completions", {"prompt": tokens(20, index), "max_tokens": 2000, "stream": True}) for index in range(3)]
        await asyncio.gather(*(call.until(2) for call in calls))
        broken.append(True)
        await asyncio.gather(*(call.finished() for call in calls))
        assert all("the device is lost" in call.events()[-2]["error"]["message"] for call in calls)
        broken.clear()
        again = await Call(app, "/v1/completions", {"prompt": tokens(20), "max_tokens": 5}).finished()
        assert again.status == 200 and again.json()["usage"]["completion_tokens"] == 5
        assert backend.streams.live == 0

    scene(backend, act)


def test_an_engine_that_cannot_go_on_says_so():
    backend = stubbed()

    async def act(app) -> None:
        backend._loop.env.hand_in(lambda _: (_ for _ in ()).throw(RuntimeError("beyond repair")))
        await until(lambda: backend.problem() is not None)
        refused = await Call(app, "/v1/completions", {"prompt": tokens(20)}).finished()
        assert refused.status == 503 and "beyond repair" in refused.json()["error"]["message"]

    scene(backend, act)


def test_end_tokens_end_an_answer_unless_they_are_to_be_ignored():
    backend = stubbed(end_tokens=frozenset(range(0, VOCAB, 5)))

    async def ask(app, **body) -> tuple[int, str]:
        answer = (await Call(app, "/v1/completions", {"prompt": tokens(20), "max_tokens": 400, **body}).finished()).json()
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    async def act(app) -> None:
        count, reason = await ask(app)
        assert reason == "stop" and count < 100
        assert await ask(app, ignore_eos=True) == (400, "length")
        assert (await ask(app, ignore_eos=True, stop_token_ids=list(range(VOCAB)))) == (1, "stop")

    scene(backend, act)


def test_a_busy_event_loop_delays_delivery_but_not_the_stamps():
    backend = stubbed(step_s=0.002)

    async def act(app) -> None:
        call = Call(app, "/v1/completions", {"prompt": tokens(20), "max_tokens": 100, "stream": True})
        await call.until(5)
        time.sleep(0.6)  # the event loop is busy with something else; the engine's thread is not
        await call.finished()
        assert len(call.events()) == 101
        gaps, _ = backend.streams.telemetry.itl.rows()
        assert dict(gaps)["0.5"] == 99

    scene(backend, act)


def test_admission_is_back_pressure_here_too():
    spec = scenario(policy={"admission": {"name": "fits", "max_queue": 1}, "batching": {"max_batch_seqs": 1}})
    backend = stubbed(spec=spec, step_s=0.002)

    async def act(app) -> None:
        calls = [Call(app, "/v1/completions", {"prompt": tokens(20, index), "max_tokens": 30}) for index in range(6)]
        await asyncio.gather(*(call.finished() for call in calls))
        assert {call.status for call in calls} == {200, 429}
        assert all("retry-after" in call.headers for call in calls if call.status == 429)

    scene(backend, act)


def test_a_refused_client_hears_what_the_policy_says_of_coming_back():
    spec = scenario(policy={"admission": {"name": "token_bucket", "tokens_per_s": 10.0, "burst_tokens": 100.0}})
    backend = stubbed(spec=spec, step_s=0.002)

    async def act(app) -> None:
        assert (await Call(app, "/v1/completions", {"prompt": tokens(90), "max_tokens": 1}).finished()).status == 200
        refused = await Call(app, "/v1/completions", {"prompt": tokens(60), "max_tokens": 1}).finished()
        assert refused.status == 429 and refused.headers["retry-after"] in ("4", "5")  # 50 tokens are missing, less what has dripped in
        never = await Call(app, "/v1/completions", {"prompt": tokens(101), "max_tokens": 1}).finished()
        assert never.status == 429 and "retry-after" not in never.headers

    scene(backend, act)


def test_a_real_decoder_samples_by_seed_whoever_else_is_served():
    spec = scenario(policy={"batching": {"max_batch_tokens": 64, "max_batch_seqs": 8}})
    tiny = runner(TINY, blocks=200, block_tokens=16)
    backend = EngineBackend(spec, Engine(tiny, 200, 256, TINY.vocab, "cpu"), ByteTokenizer(TINY.vocab))

    async def act(app) -> None:
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 1.5, "top_p": 0.9, "seed": 3}
        alone = (await Call(app, "/v1/completions", body).finished()).json()["choices"][0]["text"]
        others = [Call(app, "/v1/completions", {**body, "seed": seed}) for seed in (1, 2, 3, 4)]
        texts = [(await call.finished()).json()["choices"][0]["text"] for call in others]
        assert texts[2] == alone and len(set(texts)) > 1
        outside = await Call(app, "/v1/completions", {"prompt": [TINY.vocab]}).finished()
        assert outside.status == 400

    scene(backend, act)


def test_a_client_names_an_adapter_as_the_model():
    from test_lora import LARGE, RANK, adapted_runner, merged

    from engine.lora.adapter import random_adapter

    prompt = tokens(40, 3)  # two whole blocks: what one adapter read is not what another finds
    workload = {**scenario().resolved()["workload"], "adapters": {"names": ["A", "B"]}}
    spec = scenario(policy={"batching": {"max_batch_tokens": 64, "max_batch_seqs": 8}}, adapters={"slots": 1, "rank": RANK}, workload=workload)
    adapted = adapted_runner(1, blocks=200, block_tokens=16, max_batch_tokens=80)
    said = {}

    def told(backend, *models: str | None) -> None:
        async def act(app) -> None:
            for model in models:
                body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **({"model": model} if model else {})}
                answer = (await Call(app, "/v1/completions", body).finished()).json()
                text = answer["choices"][0]["text"]
                assert said.setdefault(answer["model"], text) == text

        scene(backend, act)

    told(EngineBackend(spec, Engine(adapted, 200, 128, VOCAB, "cpu"), ByteTokenizer(VOCAB)), None, "A", "B", "A", "llama-3.1-8b")
    assert len(set(said.values())) == len(said) == 3
    for name, text in list(said.items()):
        weights = adapted.decoder.weights if name not in "AB" else merged(adapted.decoder.weights, random_adapter(LARGE, RANK, name, 9))
        alone = runner(LARGE, weights=weights, blocks=200, block_tokens=16, max_batch_tokens=80, max_seqs=16)
        said.clear()
        told(EngineBackend(scenario(policy=spec.policy.model_dump()), Engine(alone, 200, 128, VOCAB, "cpu"), ByteTokenizer(VOCAB)), None)
        assert said == {"llama-3.1-8b": text}


def test_drafts_change_no_answer_and_no_count_and_end_tokens_still_end():
    drafting = {"speculation": {"policy": {"name": "fixed", "tokens": 4}, "acceptance": 0.5}}
    answers = []
    for parts in ({}, drafting):
        spec = scenario(policy={"batching": {"max_batch_tokens": 64, "max_batch_seqs": 8}}, **parts)
        backend = EngineBackend(spec, Engine(runner(TINY, blocks=200, block_tokens=16), 200, 256, TINY.vocab, "cpu"), ByteTokenizer(TINY.vocab))
        said = []

        async def act(app, said=said) -> None:
            for stop in ([], [7, 11, 30]):
                body = {"prompt": [5, 6, 5, 6, 5], "max_tokens": 60, "temperature": 0.6, "stop_token_ids": stop, "stream": True, "stream_options": {"include_usage": True}}
                calls = [await Call(app, "/v1/completions", {**body, "seed": seed}).finished() for seed in range(4)]
                said += [(call.text(), call.events()[-2]["usage"]["completion_tokens"]) for call in calls]

        scene(backend, act)
        answers.append(said)
        steps = backend.scheduler.steps
    assert answers[0] == answers[1]
    assert {count for _, count in answers[0][:4]} == {60} and min(count for _, count in answers[0][4:]) < 60
    assert steps < sum(count for _, count in answers[0])  # several tokens came together


def test_both_sides_tell_the_same_metrics():
    def shape(backend) -> set[tuple[str, str]]:
        text = backend.streams.telemetry.render(backend.stats).decode()
        labels = {(name, re.sub(r'"[^"]*"', "", label)) for name, label in re.findall(r"^(twinserve:\w+)\{([^}]*)\}", text, re.MULTILINE)}
        return labels | set(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))

    engine, simulated = shape(stubbed()), shape(SimBackend(scenario()))
    assert engine == simulated and len(engine) > 30


# -- tokenizers ---------------------------------------------------------------------------------------------------------


def test_bytes_come_back_as_text():
    tokenizer = ByteTokenizer(300)
    decoder = tokenizer.decoder()
    assert "".join(decoder.push(token) for token in tokenizer.encode("h\u00e9llo \U0001f600")) + decoder.flush() == "h\u00e9llo \U0001f600"
    half = tokenizer.decoder()
    assert (half.push(0xC3), half.push(299), half.push(0xC3), half.flush()) == ("", "\ufffd<299>", "", "\ufffd")
    assert max(ByteTokenizer(97).encode("xyz")) < 97


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer of three words and a chat template."""
    pytest.importorskip("tokenizers", reason="the package 'tokenizers' is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[U]": 0, "hello": 1, "world": 2, "user": 3}, unk_token="[U]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return tmp_path


def test_a_folders_tokenizer_is_used_with_its_template(folder):
    tokenizer = load_tokenizer(folder, 4)
    assert isinstance(tokenizer, FolderTokenizer)
    assert tokenizer.encode("hello world") == [1, 2]
    assert tokenizer.chat([("user", "hello")]) == [3, 1]
    decoder = tokenizer.decoder()
    assert "".join(decoder.push(token) for token in (1, 2)) == "hello world"
    assert end_tokens(folder) == {2, 3}


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="is no tokenizer"):
        load_tokenizer(folder, 4)


def test_without_a_folder_there_are_bytes_and_no_end():
    assert isinstance(load_tokenizer(None, 300), ByteTokenizer) and end_tokens(None) == frozenset()


@pytest.mark.parametrize(
    ("arguments", "word"), [(["fleet-1000"], "cluster.replicas"), (["quickstart", "--port", "-1"], "--port"), (["quickstart", "--max-waiting", "0"], "--max-waiting")]
)
def test_what_cannot_be_served_is_told_in_a_line(capsys, arguments, word):
    assert twinserve.main(["engine", "serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
