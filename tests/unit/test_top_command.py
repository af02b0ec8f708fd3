"""`isolator top` as a command: where it looks, how it ends, on terminals, in pipes and without either."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import status_node as node

from isolator.errors import UsageError
from isolator.monitor import client, document

TOP = [sys.executable, "-m", "isolator.cli", "top"]
NOWHERE = "http://127.0.0.1:1"


def environment(**more: str) -> dict[str, str]:
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("ISOLATOR_", "TERM", "COLUMNS", "LINES"))
    }
    return kept | {"ISOLATOR_MONITOR_LISTEN": "127.0.0.1:1", "ISOLATOR_MONITOR_MOUNT": "/nowhere"} | more


def top(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, without a terminal."""
    return subprocess.run([*TOP, *words], env=environment(**more), capture_output=True, text=True, timeout=60)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[str]:
    """URL of a monitor whose node has a tenant of each kind."""
    with node.busy(tmp_path) as snapshot, node.serve(lambda: snapshot) as url:
        yield url


def test_this_pods_monitor_is_asked_by_default(monitor: str) -> None:
    """The address of ISOLATOR_MONITOR_LISTEN, proxies or not; without a terminal once, and no escape code."""
    done = top(ISOLATOR_MONITOR_LISTEN=monitor.removeprefix("http://"), http_proxy=NOWHERE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu-node-1" in done.stdout and "4100 / 4147" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140


def test_json_is_the_monitors_document(monitor: str, tmp_path: Path) -> None:
    """The whole of it; `tenants` is an empty list where there is none."""
    shown = document.load(top("--json", "--url", monitor).stdout.encode())
    assert (shown.node.name, len(shown.tenants)) == (node.NODE, 7)
    (tmp_path / "empty" / "containers").mkdir(parents=True)
    told = json.loads(top("--json", "--mount", str(tmp_path / "empty")).stdout)
    assert (told["tenants"], told["devices"]) == ([], [])


def test_without_a_monitor_the_cache_folders_are_read(tmp_path: Path) -> None:
    """By pod UID, and it says both that no monitor answers and where it looked instead."""
    with node.busy(tmp_path):
        done = top(ISOLATOR_MONITOR_MOUNT=str(tmp_path))
    assert done.returncode == 0
    assert "! no monitor answers at http://127.0.0.1:1: Connection refused" in done.stdout
    assert f"! read from {tmp_path}, not from a monitor" in done.stdout
    assert "00000000-0000-0000-0000-000000000001/main" in done.stdout and "4100 / 4147" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 69, "no monitor answers at http://127.0.0.1:1: Connection refused, and /nowhere/containers"),
        (("--url", NOWHERE), 69, "no monitor answers at http://127.0.0.1:1"),
        (("--mount", "/nowhere"), 69, "/nowhere/containers cannot be read"),
        (("--url", "file:///etc/passwd"), 2, "is no address"),
        (("--url", "http://[::1"), 2, "--url"),
        (("--url", NOWHERE, "--mount", "/x"), 2, "give one of them"),
        (("--interval", "0"), 2, "--interval"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], status: int, said: str) -> None:
    """One line that says what to do, and a status that tells usage from absence."""
    done = top(*words)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"schema": 9}', b"[" * 100_000])
def test_an_answer_that_is_no_document_is_one_line(body: bytes) -> None:
    """Something else listens there."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(client.NothingReachableError, match=r"^[^\n]*not a status document[^\n]*$"):
            client.ask(f"http://127.0.0.1:{server.server_address[1]}", direct=True)
        server.shutdown()


def test_a_monitor_without_the_document_is_named(monitor: str) -> None:
    """404 of an older monitor, or of a wrong path."""
    with pytest.raises(client.NothingReachableError, match="answers 404: it may be older"):
        client.ask(f"{monitor}/x", direct=True)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        (None, "http://127.0.0.1:9394"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:81", "http://127.0.0.1:81"),
        (":82", "http://127.0.0.1:82"),
        ("10.1.2.3:83", "http://10.1.2.3:83"),
        ("[::1]:84", "http://[::1]:84"),
    ],
)
def test_monitor_is_looked_for_where_it_listens(listen: str | None, url: str) -> None:
    """A socket on every address is reached by the loopback one."""
    assert client.monitor_url({} if listen is None else {"ISOLATOR_MONITOR_LISTEN": listen}) == url
    with pytest.raises(UsageError, match="ISOLATOR_MONITOR_LISTEN"):
        client.monitor_url({"ISOLATOR_MONITOR_LISTEN": "nonsense"})


@pytest.mark.parametrize("words", [(), ("--interval", "0.2"), ("--json",)])
def test_a_reader_that_goes_away_is_no_error(monitor: str, words: tuple[str, ...]) -> None:
    """`| head -1`: status 0 and nothing on standard error, also where it repeats."""
    with subprocess.Popen(
        [*TOP, "--url", monitor, *words], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"")


def test_starts_fast(monitor: str) -> None:
    """Less than 0.6 s of processor time from start to end, imports and drawing included."""
    before = os.times()
    assert top("--once", "--url", monitor).returncode == 0
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 0.6


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, words: list[str], env: Mapping[str, str], columns: int, lines: int) -> None:
        self._master, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            words, env=dict(env), stdin=inner, stdout=inner, stderr=inner, start_new_session=True
        )
        os.close(inner)
        os.set_blocking(self._master, False)
        self.said = ""

    def read(self) -> str:
        """All that was written so far."""
        try:
            while piece := os.read(self._master, 1 << 16):
                self.said += piece.decode()
        except (BlockingIOError, OSError):
            pass
        return self.said

    def until(self, pattern: str, since: int = 0) -> None:
        """Waits until what was written after `since` characters has the pattern."""
        end = time.monotonic() + 30
        while not re.search(pattern, self.read()[since:]):
            assert time.monotonic() < end and self.process.poll() is None, self.said[-3000:]
            time.sleep(0.02)

    def end(self, number: int) -> int:
        """Exit status after a signal."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        self.read()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@contextmanager
def terminal(*words: str, term: str = "xterm", columns: int = 100, lines: int = 30) -> Iterator[Terminal]:
    made = Terminal([*TOP, *words], environment(**({"TERM": term} if term else {})), columns, lines)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_live_ends_cleanly(monitor: str, number: int, status: int) -> None:
    """It draws again and again on a screen of its own, and leaves the terminal as it was."""
    with terminal("--url", monitor, "--interval", "0.2") as screen:
        screen.until("gpu-node-1")
        screen.until("gpu-node-1", since=len(screen.said))
        assert screen.end(number) == status
        assert "\x1b[?1049h" in screen.said
        assert screen.said.rindex("\x1b[?1049l") > screen.said.rindex("gpu-node-1")
        assert screen.said.rindex("\x1b[?25h") > screen.said.rindex("\x1b[?25l")
        assert "Traceback" not in screen.said and "interrupted" not in screen.said


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_terminal_without_a_name_gets_plain_text(monitor: str, term: str) -> None:
    """No TERM, or a dumb one: one table after the other, without any escape code."""
    with terminal("--url", monitor, "--interval", "0.2", term=term, columns=60) as screen:
        screen.until("(?s)gpu-node-1.*gpu-node-1")
        assert screen.end(signal.SIGINT) == 0
        assert "\x1b" not in screen.said
        assert max(map(len, screen.said.split("\r\n"))) <= 60


def test_once_on_a_terminal_ends(monitor: str) -> None:
    """With colours, and no other screen."""
    with terminal("--once", "--url", monitor) as screen:
        assert screen.process.wait(30) == 0
        assert "\x1b[31m" in screen.read() and "\x1b[?1049h" not in screen.said


def test_a_monitor_that_goes_away_is_told_while_it_runs(tmp_path: Path) -> None:
    """The last table stays, with a line that says it is old."""
    with ExitStack() as opened:
        with node.healthy(tmp_path) as snapshot, node.serve(lambda: snapshot) as url:
            screen = opened.enter_context(terminal("--url", url, "--interval", "0.2", term="dumb"))
            screen.until("team-a/train/main")
        screen.until("this is the last answer: no monitor answers")
        screen.until("team-a/train/main", since=screen.said.index("this is the last answer"))
