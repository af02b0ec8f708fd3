"""What a pod that reaches a port of ours may take of it: places, time, memory for what it does not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS: Final = 120
"""Longer than the 90 s after which the API server gives an idle connection up itself."""
HEADER_SECONDS: Final = 10.0
"""From a connection's first byte, or its start, to the end of the request's headers."""
UNREAD_SECONDS: Final = 20.0
"""How long an answer may lie in our memory because its client does not read on."""
TICK: Final = 1.0
"""Seconds between two looks of an idle server at whether it should end; a signal wakes it."""
BACKLOG: Final = 64
"""Connections taken at once, before any of them can be turned away: each holds a descriptor."""


class Connection(H11Protocol):
    """A connection that must send its headers and read its answers in time, and makes room when there are
    too many."""

    most: ClassVar[int] = 512
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) > self.most:
            self._make_room()

    def _make_room(self) -> None:
        """Takes an idle place from the client that has most: a flood from one pod pushes out its own."""
        others = [each for each in self.connections if isinstance(each, Connection)]
        held = Counter(each.host for each in others)
        idle = [each for each in others if each.idle and each is not self]
        victim = max(idle, key=lambda each: held[each.host], default=self)
        victim.transport.abort()
        self.connections.discard(victim)

    @property
    def host(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _headers_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if self.idle:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or not self.idle:
            self._headers_came()
        elif self.conn.their_state is h11.IDLE:
            self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.idle and self.conn.trailing_data[0]:  # the next request began before this one's answer
            self._await_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        self._was_read()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """One tick a second in place of ten, which were more than half of what an idle server did."""

    wake: Callable[[], object] = staticmethod(lambda: None)
    """Ends the present pause, from a signal handler as well."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.wake()

    def pause(self) -> float:
        """Seconds until the next look, unless something wakes the server before."""
        return TICK

    async def main_loop(self) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self.wake = lambda: loop.call_soon_threadsafe(woken.set)
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), self.pause())
            woken.clear()


def config(app: Any, connection: type[Connection] = Connection, **more: Any) -> uvicorn.Config:
    """How `app` is served: HTTP alone, over connections that are bounded; uvicorn logs nothing by itself."""
    return uvicorn.Config(
        app,
        http=connection,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        **more,
    )
