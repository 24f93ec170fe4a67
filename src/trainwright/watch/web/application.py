"""What the server answers: the page, its script and style, and the View as a stream of events.

Everything lies under `/TOKEN/`, so that the page's relative addresses carry the token and its script never sees it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainwright.watch.formatting import NOT_AVAILABLE
from trainwright.watch.tables import notes, status_lines, tables
from trainwright.watch.view import Reader, View

PERIOD_S: Final = 2.0
LOOPBACK_NAMES: Final = ("127.0.0.1", "localhost", "[::1]")
_FILES: Final = Path(__file__).parent
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page_document(view: View) -> dict[str, Any]:
    """Return the View as `--json` gives it, and beside it what every view shows of it as text."""
    return {
        **view.to_json(),
        "shown": {
            "title": view.run.name if view.run is not None else "this machine",
            "status": status_lines(view.run) if view.run is not None else [],
            "tables": [{"title": table.title, "columns": table.columns, "rows": table.rows} for table in tables(view)],
            "notes": notes(view),
            "not_available": NOT_AVAILABLE,
        },
    }


class Latest:
    """The newest document for all who look, read once a period whoever looks, and only while somebody does."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._text = ""
        self._read_at = -PERIOD_S
        self._lock = asyncio.Lock()

    async def text(self) -> str:
        """Return the document as JSON, at most one period old."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._read_at >= PERIOD_S:
                # In a thread: a shared file system may take its time.
                view = await asyncio.to_thread(self._reader.read)
                self._text = json.dumps(page_document(view), separators=(",", ":"))
                self._read_at = loop.time()
            return self._text


class Guard:
    """Lets nobody in who does not come by a loopback name with the token; the rest gets 403 and learns nothing.

    The name is checked because a page from elsewhere can have its own name point to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", _NOTHING)
            await send(message)

        answer = self._app if self._may_enter(Request(scope)) else PlainTextResponse("forbidden\n", status_code=403)
        await answer(scope, receive, send_with_headers)

    def _may_enter(self, request: Request) -> bool:
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        given = request.url.path.split("/")[1].encode()
        return name in LOOPBACK_NAMES and secrets.compare_digest(given, self._token.encode())


def application(reader: Reader, token: str, closing: Callable[[], bool]) -> ASGIApp:
    """Return the ASGI application that shows what a reader reads to those who know the token, until it is `closing`."""
    latest = Latest(reader)

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"{_NOTHING}; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'"
        text = (_FILES / "page.html").read_text().replace("NONCE", nonce)
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy})

    async def script(request: Request) -> Response:
        return Response((_FILES / "page.js").read_text(), media_type="text/javascript")

    async def style(request: Request) -> Response:
        return Response((_FILES / "page.css").read_text(), media_type="text/css")

    async def events(request: Request) -> Response:
        async def stream() -> AsyncIterator[str]:
            while not closing():
                yield f"data: {await latest.text()}\n\n"
                await asyncio.sleep(PERIOD_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    routes = [
        Route("/{token}/", page),
        Route("/{token}/page.js", script),
        Route("/{token}/page.css", style),
        Route("/{token}/events", events),
    ]
    return Guard(Starlette(routes=routes), token)
