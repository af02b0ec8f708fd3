"""What answers at a monitor's address may be anything, and its words reach an administrator's terminal."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isolator.doctor.report import Report
from isolator.errors import ContractError, UsageError
from isolator.monitor import client, document

STEERING = "\x1b[31m[bold]x[/bold]\u202eabc\u009b31m\x7f<b>"
CLI = [sys.executable, "-m", "isolator.cli"]
Answer = Callable[[socket.socket], None]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """URL of a server that reads a request and lets `answer` do the rest."""
    stopped = threading.Event()

    def serve(server: socket.socket) -> None:
        while not stopped.is_set():
            with contextlib.suppress(OSError):
                taken, _ = server.accept()
                with taken, contextlib.suppress(OSError):
                    taken.settimeout(10)
                    taken.recv(1 << 16)
                    answer(taken)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            stopped.set()
            server.shutdown(socket.SHUT_RDWR)


def raw(text: bytes) -> Answer:
    return lambda taken: taken.sendall(text)


def _drops(head: bytes) -> Answer:
    """The beginning of an answer, then a byte now and then."""

    def answer(taken: socket.socket) -> None:
        taken.sendall(head)
        for _ in range(40):
            taken.sendall(b"a")
            time.sleep(0.1)

    return answer


def _endless(taken: socket.socket) -> None:
    taken.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        taken.sendall(b" " * 65536)


def text(**node: Any) -> bytes:
    """A document with a tenant whose words are all hostile."""
    tenant = {"namespace": "a", "pod": STEERING, "uid": "u", "container": STEERING, "state": STEERING}
    device = {"index": 0, "uuid": STEERING, "used": 1, "limit": 5}
    tenants = [tenant | {"reason": STEERING, "devices": [device]}]
    known = {"name": STEERING, "time": 1.7e9, "version": "1", "problems": [STEERING]} | node
    return json.dumps({"schema": 1, "node": known, "devices": [], "tenants": tenants}).encode()


def ok(body: bytes) -> Answer:
    return raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (raw(b"\x1b[31mhello\r\n\r\n"), "does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"), "does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 200 + b"\r\n"), "does not speak HTTP"),
        (raw(b""), "closed connection"),
        (
            raw(b"HTTP/1.1 302 \x1b[1m\r\nLocation: ftp://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"),
            "answers 302",
        ),
        (_endless, "more than 32 MiB"),
        (ok(b'{"schema": 7, "node": 3}'), "of schema 7, and not 1"),
    ],
)
def test_whatever_answers_is_one_line(answer: Answer, said: str) -> None:
    """Garbage, a redirect that is not followed, an answer without end, a later schema."""
    with listening(answer) as url, pytest.raises(client.NothingReachableError) as raised:
        client.ask(url, direct=True, timeout=20)
    assert said in str(raised.value) and str(raised.value).isprintable()


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_the_timeout_is_for_the_whole_answer(head: bytes) -> None:
    """One that comes byte by byte does not hold anybody up, in its headers or behind them."""
    began = time.monotonic()
    with listening(_drops(head)) as url, pytest.raises(client.NothingReachableError, match=r"within 0\.5 s"):
        client.ask(url, direct=True, timeout=0.5)
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    "url", ["http://a b:9", "http://u:p@127.0.0.1:9", "http://127.0.0.1:1/ü", "http://x:99999", "http://\n"]
)
def test_an_address_that_cannot_be_asked_is_a_usage_error(url: str) -> None:
    """Before anything is asked."""
    with pytest.raises(UsageError, match=r"^--url [^\n]*$"):
        client.status_url(url)


@pytest.mark.parametrize(
    "body",
    [
        text(time=float("nan")),
        text(time=1e300),
        text(skipped={"x": 10**400}),
        text(skipped={STEERING: "x"}),
        b'{"schema": 1, "node": ' + b"[" * 100_000,
    ],
)
def test_a_number_that_cannot_be_is_no_document(body: bytes) -> None:
    """Its reader would fail at showing it."""
    with pytest.raises(ContractError) as raised:
        document.load(body)
    assert str(raised.value).startswith("not a status document") and str(raised.value).isprintable()


@pytest.mark.parametrize("words", [["--once"], ["--json"]])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_a_terminal_is_not_steered(words: list[str], encoding: str) -> None:
    """No control character and none that turns the direction, whatever the terminal can show."""
    with listening(ok(text())) as url:
        told = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([*CLI, "top", *words, "--url", url], env=told, capture_output=True, timeout=60)
    shown = done.stdout.decode(encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "[bold]x[/bold]" in shown and all(line.isprintable() for line in shown.split("\n"))
    if words == ["--json"]:
        assert document.load(done.stdout).tenants[0].pod == STEERING


def test_the_doctor_says_nothing_that_steers() -> None:
    """A process names itself, and its name is in what was and what could not be looked at."""
    report = Report("pod", "PID 1")
    report.check(f"program of PID 7 ({STEERING})")
    report.skip(f"program of PID 7 ({STEERING})", STEERING)
    report.find("limit_zero", STEERING, STEERING)
    assert all(line.isprintable() for line in report.lines())
    assert all(line.isprintable() for line in report.json().split("\n"))


@pytest.mark.parametrize(
    ("words", "status"), [(["top", "--once"], 0), (["top", "--json"], 0), (["doctor", "node"], 44)]
)
def test_a_closed_or_full_output_costs_one_line_at_most(
    words: list[str], status: int, tmp_path: Path
) -> None:
    """A reader that left and a closed output keep the exit status; a full disk is said."""
    (tmp_path / "containers").mkdir()
    command = " ".join([*CLI, *words, "--mount", str(tmp_path)])

    def end(how: str) -> tuple[int, str]:
        done = subprocess.run(["bash", "-c", command + how], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert end(" >&-") == (status, "")
    assert end(" | true; exit ${PIPESTATUS[0]}") == (status, "")
    full = "isolator: cannot write to standard output: No space left on device\n"
    assert end(" > /dev/full") == (1, full)
