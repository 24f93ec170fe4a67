"""A real webhook on loopback, which notes what is posted to it; `/moved` leads elsewhere."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Receiver:
    """What was posted so far, as (path, body), to `address`."""

    address: str = ""
    got: list[tuple[str, Any]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def listening(cls) -> Iterator[Receiver]:
        """Listen on a free port."""
        receiver = cls()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.send_response(302 if self.path == "/moved" else 204)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        receiver.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield receiver
        finally:
            server.shutdown()
            server.server_close()

    @property
    def ends(self) -> list[dict[str, Any]]:
        """What was posted of how a run ended."""
        return [body for _, body in self.got if body["rule"].startswith("run_")]
