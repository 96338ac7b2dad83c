"""Serves a page that follows studies while they run, to browsers of this machine alone.

    pfljax watch DIR...

Looks for runs up to three levels deep. The page shows what runs, waits, is finished or has stopped, the rounds done,
the time left, and the curves so far, and loads itself again every few seconds. Ctrl-C ends the server; no run notices.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from absl import flags

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
    add.repeated(
        "folder", "folder of a run, or a folder that contains runs; the flag's name can be omitted"
    )
    add.add("port", int, 8765, "port of the page; 0: a free one", at_least=0, at_most=2**16 - 1)
    add.add("refresh", int, 5, "seconds between two loads of the page", at_least=1, at_most=86400)


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, made anew."""

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
        headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (
            headers | {"Refresh": str(self.refresh), "Cache-Control": "no-store"}
        ).items():
            self.send_header(name, value)
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
        print(
            f"watching {', '.join(map(str, folders))} at http://{HOST}:{server.server_port} (Ctrl-C ends it)"
        )
        server.serve_forever()


COMMAND = Command(__doc__ or "", define, run, devices=None, listed="folder")
