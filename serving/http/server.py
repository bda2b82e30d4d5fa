"""Serves the application on a port until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import uvicorn
from starlette.applications import Starlette

from serving.errors import InputError

BACKLOG = 2048  # connections that may wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises InputError when the address cannot be had."""
    # Made as a TCP socket by name: only then does asyncio turn Nagle's algorithm off, which would hold tokens back for 40 ms.
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError("--port", f"cannot listen on {host}:{port}: {error}") from None


def serve(app: Starlette, listening: socket.socket, *, drain_s: float, what: str) -> None:
    """Answer on ``listening`` until interrupted; then finish what is being answered within ``drain_s`` seconds (at least 1).

    ``what`` is said on stderr with the address, once.
    """
    host, port = listening.getsockname()[:2]
    print(f"serving {what} on http://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=max(1, round(drain_s)))
    # Once drained, uvicorn raises the signal that stopped it again: to us that is a proper end, not an interruption.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
