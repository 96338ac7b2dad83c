"""Serves a page that follows studies while they run, to browsers of this machine alone.

    pfljax watch DIR...

Looks for runs up to three levels deep. The page shows which runs are running, waiting, finished or stopped, their
rounds, the remaining time and the curves so far, and refreshes every few seconds. Stop the server with Ctrl-C; runs are
not affected.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from absl import flags

from pfljax.cli.flag_help import HELP
from pfljax.cli.flags import RUNS
from pfljax.cli.launch import Command
from pfljax.cli.parsing import Group
from pfljax.cli.report import read_folders
from pfljax.cli.settings import Settings
from pfljax.report import watching

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")


def define(registry: flags.FlagValues) -> None:
    add = Group(RUNS, registry)
    add.repeated("folder", HELP["folder"])
    add.add("port", int, 8765, HELP["port"], at_least=0, at_most=2**16 - 1)
    add.add("refresh", int, 5, HELP["refresh"], at_least=1, at_most=86400)


class Handler(BaseHTTPRequestHandler):
    """Answers every request with a new page."""

    def __init__(self, folders: Sequence[Path], refresh: int, *args):
        self.folders = folders
        self.refresh = refresh
        super().__init__(*args)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser has left
            super().handle()

    def do_GET(self) -> None:
        """Sends the page. Refuses other names than this machine's own, under which a foreign site could read it."""
        if self.path != "/" or self.headers.get("Host", "").partition(":")[0] not in NAMES:
            return self.send_error(404)
        content = watching.page(self.folders, self.refresh).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Refresh", str(self.refresh))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args) -> None:
        """Logs nothing."""


def make_server(folders: Sequence[Path], port: int, refresh: int) -> ThreadingHTTPServer:
    """Returns the server of the page; port 0 takes a free one."""
    return ThreadingHTTPServer((HOST, port), functools.partial(Handler, folders, refresh))


def run(settings: Settings) -> None:
    folders = read_folders(settings, "watch")
    try:
        server = make_server(folders, settings.port, settings.refresh)
    except OSError as error:
        text = f"{(error.strerror or str(error)).lower()}; accepted: a free port, or 0 to find one"
        raise settings.error("port", text) from error
    with server, contextlib.suppress(KeyboardInterrupt):
        address = f"http://{HOST}:{server.server_port}"
        print(f"watching {', '.join(map(str, folders))} at {address} (stop with Ctrl-C)")
        server.serve_forever()


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="folder")
