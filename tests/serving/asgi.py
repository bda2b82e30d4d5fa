"""A client of an ASGI application without a socket, which sees each event when it is sent and can hang up in the middle."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Call:
    """One POST under way. ``body`` grows as the application sends; ``hang_up`` is the client going away."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._sent = False
        self._payload = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"content-type", b"application/json")],
            "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        self.task.add_done_callback(lambda _: self._news.set())

    async def _receive(self) -> dict:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._payload, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
        self._news.set()

    def hang_up(self) -> None:
        """The client goes away."""
        self._gone.set()

    async def until(self, events: int) -> None:
        """Wait until so many events have come, or the answer is complete."""
        while len(self.events()) < events and not self.task.done():
            self._news.clear()
            await self._news.wait()

    async def finished(self) -> Call:
        """Wait for the end."""
        await self.task
        return self

    def events(self) -> list[Any]:
        """The events so far, decoded; the last is ``[DONE]``."""
        complete = self.body.split(b"\n\n")[:-1]
        assert all(each.startswith(b"data: ") for each in complete), complete
        return [each.decode()[6:] if each == b"data: [DONE]" else json.loads(each[6:]) for each in complete]

    def json(self) -> Any:
        """The body as one object."""
        return json.loads(self.body)

    def text(self) -> str:
        """The text of a streamed answer, of either endpoint."""
        choices = [choice for event in self.events() if event != "[DONE]" for choice in event.get("choices", ())]
        return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
