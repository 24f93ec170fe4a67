"""Serves the page until Ctrl+C, and says how to reach it from elsewhere."""

from __future__ import annotations

import getpass
import secrets
import socket
import sys
from contextlib import suppress

import uvicorn

from trainwright.errors import ExitCode, UserError
from trainwright.watch.view import Reader
from trainwright.watch.web.application import application


def serve(reader: Reader, port: int) -> None:
    """Serve on 127.0.0.1; port 0 is a free one. Raises UserError when the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        message = f"port {port} cannot be used: {error.strerror}"
        raise UserError(message, hints=["leave --port out: a free one is taken"], exit_code=ExitCode.FAILED) from error
    listening.listen()
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    print(f"http://127.0.0.1:{port}/{token}/", flush=True)
    host = f"{getpass.getuser()}@{socket.gethostname()}"
    print(
        f"Only this machine can open it, and only with this address. From another:\n"
        f"  ssh -N -L {port}:127.0.0.1:{port} {host}\nthen open the same address there. Ctrl+C ends it.",
        file=sys.stderr,
        flush=True,
    )
    server: uvicorn.Server
    config = uvicorn.Config(
        application(reader, token, lambda: server.should_exit),
        # An access log would write the token down.
        access_log=False,
        log_level="error",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # uvicorn gives the signal that ended it to its former handler.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
