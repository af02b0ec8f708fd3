"""A server of each node that nobody asks costs next to nothing, and still ends at once."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from fastapi import FastAPI

from isolator import serving


def test_an_idle_server_looks_once_a_second_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three ticks in two seconds; a signal ends it well before the next one."""
    server = serving.Server(serving.config(FastAPI(), port=0))
    ticks: list[float] = []
    tick = server.on_tick

    async def counted(number: int) -> bool:
        ticks.append(time.monotonic())
        return await tick(number)

    monkeypatch.setattr(server, "on_tick", counted)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    time.sleep(2.1)
    assert 2 <= len(ticks) <= 4
    # Just after a tick the next is almost a second away.
    seen = len(ticks)
    while len(ticks) == seen:
        time.sleep(0.005)
    began = time.monotonic()
    server.handle_exit(signal.SIGTERM, None)
    thread.join(10)
    assert not thread.is_alive() and time.monotonic() - began < 0.8
