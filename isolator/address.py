"""`host:port` as an operator writes it, and the socket that listens there."""

from __future__ import annotations

import socket

from isolator.errors import UsageError


def split_address(value: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[ipv6]:port` or `:port` (every address, IPv4 and IPv6).

    Raises ValueError with one line.
    """
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(
            f"{value!r} is not host:port: write 0.0.0.0:PORT, [::]:PORT or :PORT, with a port up to 65535"
        )
    if ":" in host and not bracketed:
        raise ValueError(f"{value!r}: write an IPv6 address in brackets, for example [::]:{port}")
    return host[1:-1] if bracketed else host, int(port)


def listen(address: str, variable: str) -> socket.socket:
    """A socket that listens on `address`; without a host, and on [::], on IPv4 and IPv6 where both are there.

    Raises UsageError, naming the setting `variable`, where the address cannot be had.
    """
    host, port = split_address(address)
    dual = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    try:
        bound = socket.create_server(
            ("::" if dual else host, port), family=family, dualstack_ipv6=dual, backlog=512
        )
    except OSError as error:
        raise UsageError(f"{variable}: cannot listen on {address}: {error.strerror or error}") from error
    # asyncio sets this only on sockets of its own making; without it an answer may wait 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound
