"""Tokens of prompts that come again: the same list, without cutting again, by the policy that the simulator's stages use."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")
httpx = pytest.importorskip("httpx")

from scripted_backend import Letters, Scripted

from serving.errors import InputError
from serving.http.app import build_app
from serving.http.command import serve_backend
from serving.http.remembered import RememberedTokens
from serving.policies import load


class Counted(Letters):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.cuts = 0

    def encode(self, text):
        self.cuts += 1
        return super().encode(text)


def remembered(policy: str = "always", capacity_bytes: float = 1e6, **options: object) -> tuple[RememberedTokens, Counted]:
    inner = Counted()
    return RememberedTokens(inner, capacity_bytes, load("branch", policy, options)), inner


def test_a_prompt_that_comes_again_is_cut_once_and_the_same():
    tokens, inner = remembered()
    first = tokens.encode("abc")
    first.append(99)  # whoever got the list may change it
    assert tokens.encode("abc") == [97, 98, 99] and inner.cuts == 1
    assert tokens.chat([("user", "abc")]) == tokens.chat([("user", "abc")]) == Letters().chat([("user", "abc")]) and inner.cuts == 2
    assert tokens.chat([("usera", "bc")]) == Letters().chat([("usera", "bc")]) and inner.cuts == 3, "the same letters, cut elsewhere"
    assert tokens.cache.report()["hits"] == 2 and tokens.vocab == Letters.vocab


def test_it_holds_no_more_than_it_may():
    tokens, inner = remembered(capacity_bytes=40.0)  # a prompt of four letters takes 4 + 4 x 4 bytes
    for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb"):
        tokens.encode(text)
    assert inner.cuts == 4 and tokens.cache.bytes == 40.0


def test_the_policy_decides_whether_to_look():
    never, inner = remembered("never")
    assert [never.encode("x") for _ in range(3)] == [[120]] * 3 and inner.cuts == 3
    predicted, inner = remembered("predicted", weight=0.5)
    for _ in range(10):
        predicted.encode("x")
    assert inner.cuts == 4, "cut once, seen to be there three times: 0.875 exceeds 0.75"


def test_the_surface_answers_as_without_it():
    def ask(backend):
        async def exchange():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(backend)), base_url="http://test") as client:
                return [(await client.post("/v1/completions", content=json.dumps({"prompt": "abc"}))).json() for _ in range(2)]

        return [{key: answer[key] for key in ("choices", "usage")} for answer in asyncio.run(exchange())]

    with_memory = Scripted("hello")
    with_memory.tokenizer, inner = remembered()
    assert ask(with_memory) == ask(Scripted("hello")) and inner.cuts == 1


def test_a_size_that_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="--token-cache-mib"):
        serve_backend(lambda: None, host="127.0.0.1", port=0, max_waiting=None, drain_s=1.0, token_cache_mib=0.0)
