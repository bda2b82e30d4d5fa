"""What the two ``serve`` commands share: their options, and the way from a backend to a listening server."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from serving.errors import InputError
from serving.policies import load as load_policy

if TYPE_CHECKING:
    from serving.http.backend import Backend

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0: any that is free.")]
MaxWaiting = Annotated[int | None, typer.Option(metavar="N", help="Send clients away (429) while so many requests wait for their first token.")]
Drain = Annotated[float, typer.Option("--drain-s", metavar="S", help="When stopped, let requests finish for so long.")]

TokenCache = Annotated[float | None, typer.Option("--token-cache-mib", metavar="MIB", help="Keep the tokens of prompts, for those that come again.")]


def serve_backend(
    build: Callable[[], tuple[Backend, str]], *, host: str, port: int, max_waiting: int | None, drain_s: float, token_cache_mib: float | None = None
) -> None:
    """Serve the backend that ``build`` makes, with words on what it is, until interrupted.

    Raises InputError for an option that makes no sense, an address that cannot be had (before ``build`` is called), or a missing package.
    """
    if not 0 <= drain_s < math.inf:
        raise InputError("--drain-s", f"{drain_s:g} is no number of seconds")
    if max_waiting is not None and max_waiting < 1:
        raise InputError("--max-waiting", f"{max_waiting} would turn everybody away", "give at least 1")
    if token_cache_mib is not None and not 0 < token_cache_mib < math.inf:
        raise InputError("--token-cache-mib", f"{token_cache_mib:g} is no size above 0")
    try:
        import prometheus_client  # noqa: F401 - asked for here, where its absence can be told in a line

        from serving.http import server
        from serving.http.app import build_app
        from serving.http.remembered import RememberedTokens
        from serving.http.service import Limits
    except ImportError as missing:
        raise InputError("serve", f"needs the package '{missing.name}'", "pip install 'twinserve[serve]'") from None
    with server.listen(host, port) as listening:
        backend, what = build()
        if token_cache_mib is not None:
            backend.tokenizer = RememberedTokens(backend.tokenizer, token_cache_mib * 2**20, load_policy("branch", "always"))
        app = build_app(backend, Limits(max_waiting=max_waiting), drain_s=drain_s)
        server.serve(app, listening, drain_s=drain_s, what=what)
