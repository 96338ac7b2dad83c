"""`pfljax watch`: what it serves, to whom, and how it ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from commands import call, one_line

from pfljax.cli import watch


@pytest.fixture
def port(tmp_path):
    """The port of a server that watches `tmp_path`."""
    with watch.make_server([tmp_path], 0, 3) as server:
        assert server.server_address[0] == "127.0.0.1"  # reached from nowhere else
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def answer(port, path="/", host="localhost"):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse()


def test_every_load_shows_the_folder_as_it_is_now(port, tmp_path):
    address = f"http://127.0.0.1:{port}/"
    with urllib.request.urlopen(address) as page:
        assert page.headers["Refresh"] == "3" and "no runs yet" in page.read().decode()
    folder = tmp_path / "local" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"rounds": 5}))
    with urllib.request.urlopen(address) as page:
        assert "1 stopped" in page.read().decode()
    (folder / "config.json").write_text("{")
    with urllib.request.urlopen(address) as page:
        assert "config.json cannot be read" in page.read().decode()


def test_only_the_page_is_served_and_only_to_this_machine(port):
    assert answer(port).status == 200 and answer(port, "/.lock").status == 404
    assert answer(port, "/../etc/passwd").status == 404
    assert answer(port, host="evil.example").status == 404  # a foreign site whose name leads here


def test_a_browser_that_leaves_is_not_told_of(port, capfd):
    with socket.create_connection(("127.0.0.1", port)) as one:
        # resets the connection
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer(port).status == 200 and capfd.readouterr().err == ""


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        for words, said in (
            ([], "give a run's folder: pfljax watch DIR..."),
            ([tmp_path / "nowhere"], f"{tmp_path / 'nowhere'}: No such file or directory"),
            ([tmp_path / "file"], f"{tmp_path / 'file'}: Not a directory"),
            (
                [tmp_path, f"--port={used}"],
                f"--port={used}: address already in use; accepted: a free port",
            ),
            ([tmp_path, "--port=65536"], "--port=65536: accepted: whole numbers"),
            ([tmp_path, "--refresh=0"], "--refresh=0: accepted: whole numbers"),
            ([tmp_path, "--rounds=3"], "--rounds: unknown flag"),
        ):
            assert one_line(call(watch.COMMAND, *words, code=2)).startswith(said)


@pytest.mark.slow
def test_ctrl_c_ends_it_in_silence(tmp_path):
    # a background job ignores it
    accept = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{accept}; from pfljax.cli import main; main(['watch', {str(tmp_path)!r}, '--port=0'])"
    words = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=root, env=os.environ, **pipes) as process:
        try:
            assert process.stdout.readline().startswith(f"watching {tmp_path} at http://127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "") and process.returncode == 0
        finally:
            process.kill()
