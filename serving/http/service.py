"""One request from its body to its answer: check, submit, stream; and let go of it when the client does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from serving.http.answers import DONE, Answer, encoded
from serving.http.backend import Backend, Departure
from serving.http.bodies import ChatBody, CompletionBody
from serving.http.delivery import TokenStream
from serving.http.problems import ApiError, invalid, read_json, refused
from serving.http.text import Text

ENDINGS = {"stop": "stop", "length": "length", "kv_capacity": "length"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes on. ``max_waiting``: requests without a token yet, beyond which further ones are told to come back."""

    body_bytes: int = 16 * 2**20
    max_waiting: int | None = None
    retry_after_s: int = 1


class Service:
    """The requests of one server."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend = backend
        self.limits = limits
        self.draining = False

    def check_open(self) -> None:
        """Raise ApiError 503 when nothing new is served."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=self.limits.retry_after_s)
        problem = self.backend.problem()
        if problem is not None:
            raise ApiError(503, f"the server cannot serve: {problem}", code="unavailable")

    async def drain(self, limit_s: float | None = None) -> bool:
        """Take nothing new and wait until all that is here has been answered, at most ``limit_s``; whether it was."""
        self.draining = True
        try:
            await asyncio.wait_for(self.backend.streams.drained(), limit_s)
        except TimeoutError:
            return False
        return True

    def submit(self, body: CompletionBody | ChatBody) -> TokenStream:
        """Hand a checked body to the backend. Raises ApiError when it asks for too much."""
        backend = self.backend
        adapter = "" if body.model in (None, backend.llm) else body.model
        if adapter and adapter not in backend.adapters:
            raise ApiError(404, f"there is no model '{adapter}' here; it serves '{backend.llm}'", param="model", code="model_not_found")
        self.check_open()
        waiting = backend.streams.waiting
        if self.limits.max_waiting is not None and waiting >= self.limits.max_waiting:
            backend.streams.telemetry.rejected("max_waiting")
            raise refused("max_waiting", self.limits.retry_after_s)
        chat = isinstance(body, ChatBody)
        prompt = self._prompt(body)
        room = backend.max_model_len - len(prompt)
        asked = body.cap if chat else body.max_tokens
        if room < 1 or (asked or 1) > room:
            raise ApiError(
                400, f"at most {backend.max_model_len} tokens fit, prompt and answer together; the prompt has {len(prompt)}"
                + (f" and {asked} more are asked for" if asked else ""),
                param="messages" if chat else "prompt", code="context_length_exceeded",
            )  # fmt: skip
        return backend.submit(body.generation(prompt, asked or room, adapter))

    def _prompt(self, body: CompletionBody | ChatBody) -> list[int]:
        tokenizer = self.backend.tokenizer
        if isinstance(body, ChatBody):
            return tokenizer.chat([(message.role, message.text) for message in body.messages])
        prompt = body.prompt if isinstance(body.prompt, list) else tokenizer.encode(body.prompt)
        if not prompt:
            raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
        if max(prompt) >= tokenizer.vocab:
            raise ApiError(400, f"token {max(prompt)} is outside the vocabulary of {tokenizer.vocab}", param="prompt", code="invalid_value")
        return prompt


class Endpoint:
    """An ASGI application that answers bodies of one kind."""

    def __init__(self, service: Service, body: type[CompletionBody] | type[ChatBody]) -> None:
        self._service = service
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError as long as nothing has been sent."""
        service = self._service
        value = await read_json(Request(scope, receive), service.limits.body_bytes)
        try:
            body = self._body.model_validate(value)
        except ValidationError as error:
            raise invalid(error) from None
        stream = service.submit(body)
        hang_up = asyncio.ensure_future(_gone(receive))
        hang_up.add_done_callback(lambda _: self._let_go(stream))
        try:
            await self._answer(stream, body, scope, receive, send)
        finally:
            hang_up.cancel()
            self._let_go(stream)

    def _let_go(self, stream: TokenStream, status: str = "aborted") -> None:
        """Nobody reads the stream any more."""
        if stream.end is None:
            stream.ends_as = status
            stream.end = Departure(stream.request_id, status, stream.last_s)
            self._service.backend.abort(stream.request_id)
            stream.wake()

    async def _answer(self, stream: TokenStream, body: CompletionBody | ChatBody, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing is sent before the first token: until then the status can still tell of a refusal or a failure."""
        backend = self._service.backend
        tokens, end = await stream.next()
        if end is not None:
            self._raise_unless_answered(end)
        answer = Answer(
            stream.request_id, body.model or backend.llm, int(time.time()), chat=isinstance(body, ChatBody), null_usage=body.stream and body.include_usage
        )
        text = Text(backend.tokenizer.decoder(), body.stop)
        if body.stream:
            await self._stream(stream, tokens, end, text, answer, body.include_usage, send)
            return
        pieces: list[str] = []
        while True:
            pieces += text.push(tokens)
            if text.stopped:
                self._let_go(stream, "stop")
                end = stream.end
            if end is not None:
                break
            tokens, end = await stream.next()
        self._raise_unless_answered(end)
        pieces.append(text.finish())
        finish = "stop" if text.stopped else ENDINGS[end.status]
        await JSONResponse(answer.whole("".join(pieces), finish, stream.prompt_tokens, text.count))(scope, receive, send)

    async def _stream(
        self, stream: TokenStream, tokens: list[int], end: Departure | None, text: Text, answer: Answer, include_usage: bool, send: Send
    ) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events = [answer.opening()]
        while True:
            pieces = text.push(tokens)
            if text.stopped:
                self._let_go(stream, "stop")
                end = stream.end
            if end is not None:
                break
            events += map(answer.event, pieces)
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            events.clear()
            tokens, end = await stream.next()
        events += self._ending(end, pieces, text, answer)
        if include_usage:
            events.append(answer.usage_event(stream.prompt_tokens, text.count))
        await send({"type": "http.response.body", "body": b"".join([*events, DONE])})

    def _ending(self, end: Departure, pieces: list[str], text: Text, answer: Answer) -> list[bytes]:
        """The last events: the tokens that came with the end, and why it is the end."""
        if end.status not in ENDINGS:
            return [*map(answer.event, pieces), encoded(_failure(end).body())]
        rest = text.finish()
        pieces = [*pieces[:-1], (pieces[-1] if pieces else "") + rest]
        return [*map(answer.event, pieces[:-1]), answer.event(pieces[-1], "stop" if text.stopped else ENDINGS[end.status])]

    def _raise_unless_answered(self, end: Departure) -> None:
        if end.status == "rejected":
            told_s = end.retry_after_s
            raise refused(end.detail, self._service.limits.retry_after_s if told_s is None else told_s)
        if end.status not in ENDINGS:
            raise _failure(end)


def _failure(end: Departure) -> ApiError:
    if end.status == "aborted":
        return ApiError(503, "the request was dropped", code="aborted")
    return ApiError(500, f"the request failed: {end.detail}", code="generation_failed")


async def _gone(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
