"""The OpenAI surface over a scripted backend: what is sent, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx")

from asgi import Call
from prometheus_client.parser import text_string_to_metric_families
from scripted_backend import Letters, Scripted

from serving.http.app import build_app
from serving.http.content_keys import content_keys
from serving.http.service import Limits
from serving.http.text import Text


def ask(backend: Scripted, path: str, body: object, limits: Limits | None = None) -> httpx.Response:
    """One exchange through httpx, which reads the answer as any client would. A body of bytes goes as it is; None is a GET."""

    async def exchange() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(backend, limits)), base_url="http://test") as client:
            if body is None:
                return await client.get(path)
            return await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))

    return asyncio.run(exchange())


def events(response: httpx.Response) -> list:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_completion():
    answer = ask(Scripted("hello"), "/v1/completions", {"model": "scripted", "prompt": "abc"}).json()
    assert answer["object"] == "text_completion" and answer["model"] == "scripted"
    assert answer["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_chat():
    backend = Scripted("hello")
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    answer = ask(backend, "/v1/chat/completions", body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    asked = backend.asked[0]
    assert "".join(map(chr, asked.prompt)) == "system:s|user:ab|"
    assert asked.max_tokens == 64 - len(asked.prompt)  # a chat without a limit may fill what is left


def test_all_parameters_reach_the_backend():
    backend = Scripted("x")
    body = {
        "prompt": [3, 1, 2], "max_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 9, "ignore_eos": True, "priority": -2,
        "stop_token_ids": [5], "user": "someone", "stop": None, "n": 1, "logprobs": None, "unheard_of": 1,
    }  # fmt: skip
    assert ask(backend, "/v1/completions", body).status_code == 200
    asked = backend.asked[0]
    assert (asked.prompt, asked.max_tokens, asked.temperature, asked.top_p, asked.top_k, asked.seed) == ([3, 1, 2], 7, 0, 0.5, 4, 9)
    assert (asked.ignore_eos, asked.priority, asked.stop_token_ids, asked.tenant) == (True, -2, {5}, "someone")
    ask(backend, "/v1/completions", {"prompt": "a"})
    assert (backend.asked[1].max_tokens, backend.asked[1].temperature) == (16, 1.0)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_one_event_a_token_then_usage_then_done(chat):
    body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = ask(Scripted('h"\n\u00e9'), path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None and chunk["id"] == usage["id"] for chunk in chunks)
    if chat:
        opening, *chunks = chunks
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    pieces = [chunk["choices"][0]["delta"]["content"] if chat else chunk["choices"][0]["text"] for chunk in chunks]
    assert pieces == ["h", '"', "\n", "\u00e9"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_without_the_option_no_event_speaks_of_usage():
    *chunks, done = events(ask(Scripted("ab"), "/v1/completions", {"prompt": "a", "stream": True}))
    assert done == "[DONE]" and not any("usage" in chunk for chunk in chunks)


def test_tokens_are_sent_as_they_come():
    async def scene() -> None:
        backend = Scripted()
        call = Call(build_app(backend), "/v1/completions", {"prompt": "a", "stream": True})
        while not backend.asked:
            await asyncio.sleep(0)
        assert call.status == 0  # until the first token the status can still tell of a failure
        for count, letter in enumerate("hello", 1):
            backend.say(0, letter)
            await call.until(count)
            assert call.text() == "hello"[:count]
        backend.end(0, "length")
        assert (await call.finished()).events()[-2]["choices"][0]["finish_reason"] == "length"

    asyncio.run(scene())


def test_a_slow_reader_gets_all_tokens_in_order():
    async def scene() -> None:
        backend = Scripted()
        call = Call(build_app(backend), "/v1/completions", {"prompt": "a", "stream": True})
        while not backend.asked:
            await asyncio.sleep(0)
        for letter in "all at once":
            backend.say(0, letter)
        backend.end(0, "stop")
        await call.finished()
        assert call.text() == "all at once" and len(call.events()) == len("all at once") + 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("stop", "script", "text", "tokens"),
    [("lo", "hello you", "hel", 5), (["zz", "o y"], "hello you", "hell", 7), ("xy", "axxyb", "ax", 4), ("end", "amen", "amen", 4), ("n", "none", "", 1)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(stop, script, text, tokens, stream):
    backend = Scripted(script)
    response = ask(backend, "/v1/completions", {"prompt": "a", "stop": stop, "stream": stream, "stream_options": {"include_usage": True}})
    if stream:
        *chunks, usage, _ = events(response)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks), chunks[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]
    else:
        answer = response.json()
        got = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
    assert got == (text, "stop", tokens)


def test_a_stop_string_frees_the_request_at_once_and_counts_as_a_proper_end():
    async def scene() -> None:
        backend = Scripted()
        call = Call(build_app(backend), "/v1/completions", {"prompt": "a", "stop": "!", "stream": True})
        while not backend.asked:
            await asyncio.sleep(0)
        backend.say(0, "a")
        backend.say(0, "!")
        await call.finished()
        assert backend.aborted == [0] and call.text() == "a"
        assert _sample(backend, "request_success_total", finished_reason="stop") == 1

    asyncio.run(scene())


def test_text_is_what_the_tokens_say_whatever_the_stops_and_the_portions():
    whole = "abcabcabdabcabe"
    for stops in ([], ["abd"], ["abe"], ["abcabe", "zz"], ["q"]):
        for portion in range(1, 5):
            text = Text(Letters(), stops)
            got = "".join("".join(text.push([ord(c) for c in whole[at : at + portion]])) for at in range(0, len(whole), portion)) + text.finish()
            cuts = [whole.find(stop) for stop in stops if stop in whole]
            assert got == (whole[: min(cuts)] if cuts else whole)


@pytest.mark.parametrize("where", ["queued", "streaming", "whole"])
def test_a_client_that_hangs_up_lets_go_of_its_request(where):
    async def scene() -> None:
        backend = Scripted()
        call = Call(build_app(backend), "/v1/completions", {"prompt": "a", "stream": where != "whole"})
        while not backend.asked:
            await asyncio.sleep(0)
        if where == "streaming":
            backend.say(0, "a")
            await call.until(1)
        call.hang_up()
        await call.finished()
        assert backend.aborted == [0] and backend.streams.live == 0
        assert _sample(backend, "request_success_total", finished_reason="abort") == 1

    asyncio.run(scene())


def test_a_request_that_fails_says_so_and_the_others_go_on():
    async def scene() -> None:
        backend = Scripted()
        app = build_app(backend)
        early, late, other = (Call(app, "/v1/completions", {"prompt": "a", "stream": True}) for _ in range(3))
        while len(backend.asked) < 3:
            await asyncio.sleep(0)
        backend.end(0, "error", "its step failed")
        backend.say(1, "a")
        await late.until(1)  # from here on the status cannot tell any more
        backend.end(1, "error", "its step failed")
        backend.say(2, "b")
        backend.end(2, "stop")
        await asyncio.gather(*(call.finished() for call in (early, late, other)))
        assert early.status == 500 and early.json()["error"]["type"] == "server_error"
        assert late.status == 200 and "its step failed" in late.events()[-2]["error"]["message"] and late.events()[-1] == "[DONE]"
        assert other.text() == "b"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "no JSON"), (b"[]", 400, "object"), (b"\xff", 400, "no JSON"), ({}, 400, "prompt"), ({"prompt": ""}, 400, "empty"),
        ({"prompt": ["a", "b"]}, 400, "several"), ({"prompt": [1, -1]}, 400, "prompt"), ({"prompt": [0x110000]}, 400, "vocabulary"),
        ({"prompt": [True]}, 400, "prompt"), ({"prompt": 3}, 400, "prompt"), ({"prompt": "a" * 64}, 400, "64 tokens fit"),
        ({"prompt": "a", "max_tokens": 64}, 400, "64 tokens fit"), ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"), ({"prompt": "a", "top_p": 0}, 400, "top_p"),
        ({"prompt": "a", "n": 2}, 400, "'n' = 2"), ({"prompt": "a", "logprobs": 1}, 400, "logprobs"), ({"prompt": "a", "echo": True}, 400, "echo"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"), ({"prompt": "a", "min_tokens": 3}, 400, "min_tokens"),
        ({"prompt": "a", "model": "other"}, 404, "'other'"), (b'{"prompt": "' + b"a" * 2000 + b'"}', 413, "1000 bytes"),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_what_is_wrong(body, status, word):
    backend = Scripted("x")
    response = ask(backend, "/v1/completions", body, Limits(body_bytes=1000))
    error = response.json()["error"]
    assert response.status_code == status and word in error["message"] and set(error) == {"message", "type", "param", "code"}
    assert not backend.asked and backend.streams.live == 0


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}])
def test_a_bad_conversation_is_refused(body):
    assert ask(Scripted("x"), "/v1/chat/completions", body).status_code == 400


def test_wrong_paths_and_methods_get_error_objects_too():
    assert ask(Scripted(), "/v1/nothing", None).json()["error"]["type"] == "not_found_error"
    response = ask(Scripted(), "/v1/completions", None)
    assert response.status_code == 405 and "error" in response.json()


def test_refusals_are_back_pressure_unless_waiting_cannot_help():
    busy = ask(Scripted(refuse="max_queue"), "/v1/completions", {"prompt": "a", "stream": True}, Limits(retry_after_s=3))
    assert busy.status_code == 429 and busy.headers["retry-after"] == "3" and busy.json()["error"]["code"] == "max_queue"
    never = ask(Scripted(refuse="kv_capacity"), "/v1/completions", {"prompt": "a"})
    assert never.status_code == 400 and "retry-after" not in never.headers


def test_a_queue_that_is_too_long_takes_no_more_until_someone_has_a_token():
    async def scene() -> None:
        backend = Scripted()
        app = build_app(backend, Limits(max_waiting=2))
        calls = [Call(app, "/v1/completions", {"prompt": "a", "stream": True}) for _ in range(3)]
        await calls[2].finished()
        assert calls[2].status == 429 and calls[2].headers["retry-after"] == "1"
        backend.say(0, "a")
        late = Call(app, "/v1/completions", {"prompt": "a", "stream": True})
        while len(backend.asked) < 3:
            await asyncio.sleep(0)
        for request_id in backend.asked:
            backend.end(request_id, "stop")
        await asyncio.gather(*(call.finished() for call in (*calls, late)))
        assert [call.status for call in (*calls, late)] == [200, 200, 429, 200]
        assert _sample(backend, "requests_rejected_total", limit="max_waiting") == 1

    asyncio.run(scene())


def test_health_tells_whether_anything_can_be_served():
    backend = Scripted("x")
    assert ask(backend, "/health", None).status_code == 200
    backend.broken = "the device is lost"
    assert ask(backend, "/health", None).status_code == 503
    refused = ask(backend, "/v1/completions", {"prompt": "a"})
    assert refused.status_code == 503 and "the device is lost" in refused.json()["error"]["message"]


def test_the_model_and_its_adapters_are_listed():
    card, tuned = ask(Scripted(), "/v1/models", None).json()["data"]
    assert card["id"] == "scripted" and card["max_model_len"] == 64
    assert tuned["id"] == "tuned" and tuned["parent"] == "scripted"


def test_an_adapter_is_asked_for_as_the_model():
    backend = Scripted("x")
    for model, adapter in ((None, ""), ("scripted", ""), ("tuned", "tuned")):
        answer = ask(backend, "/v1/completions", {"prompt": "a", "model": model}).json()
        assert answer["model"] == (model or "scripted")
        assert list(backend.asked.values())[-1].adapter == adapter
    assert ask(backend, "/v1/completions", {"prompt": "a", "model": "untuned"}).status_code == 404


def test_shutting_down_finishes_what_is_there_and_takes_nothing_new():
    async def scene() -> None:
        backend = Scripted()
        app = build_app(backend, drain_s=5.0)
        async with app.router.lifespan_context(app):
            assert backend.started
            call = Call(app, "/v1/completions", {"prompt": "a", "stream": True})
            while not backend.asked:
                await asyncio.sleep(0)
            draining = asyncio.ensure_future(app.state.service.drain(5.0))
            await asyncio.sleep(0)
            refused = await Call(app, "/v1/completions", {"prompt": "a"}).finished()
            assert refused.status == 503 and not draining.done() and not backend.closed
            backend.say(0, "a")
            backend.end(0, "stop")
            assert await draining
            await call.finished()
            assert call.text() == "a"
        assert backend.closed

    asyncio.run(scene())


def test_draining_has_a_limit():
    async def scene() -> None:
        backend = Scripted()
        app = build_app(backend)
        Call(app, "/v1/completions", {"prompt": "a"})
        while not backend.asked:
            await asyncio.sleep(0)
        assert not await app.state.service.drain(0.01)

    asyncio.run(scene())


def _sample(backend: Scripted, name: str, **labels: str) -> float:
    text = backend.streams.telemetry.render(backend.stats).decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"twinserve:{name}" and labels.items() <= sample.labels.items()
    )


def test_metrics_add_up():
    async def scene() -> None:
        backend = Scripted("abc")
        app = build_app(backend)
        for _ in range(2):
            await Call(app, "/v1/completions", {"prompt": "12345"}).finished()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        expected = {
            "num_requests_running": 1, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25, "num_preemptions_total": 3,
            "prefix_cache_queries_total": 40, "prefix_cache_hits_total": 8, "prompt_tokens_total": 10, "generation_tokens_total": 6,
            "time_to_first_token_seconds_count": 2, "time_to_first_token_seconds_sum": 0.2, "inter_token_latency_seconds_count": 4,
            "inter_token_latency_seconds_sum": 0.4, "time_per_output_token_seconds_count": 4, "e2e_request_latency_seconds_sum": 0.6,
            "request_time_per_output_token_seconds_sum": 0.2, "request_generation_tokens_sum": 6, "request_success_total": 2,
        }  # fmt: skip
        assert {name: _sample(backend, name) for name in expected} == pytest.approx(expected)
        assert _sample(backend, "time_to_first_token_seconds_bucket", le="+Inf") == 2
        assert _sample(backend, "time_to_first_token_seconds_bucket", le="0.05") == 0

    asyncio.run(scene())


def test_content_keys_name_prefixes():
    one, other = content_keys([1, 2, 3, 4, 5], 2), content_keys([1, 2, 3, 9], 2)
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    assert content_keys([3, 4], 2)[0] != one[1]  # a key stands for all that came before, too
    assert content_keys([1], 2) == ()
