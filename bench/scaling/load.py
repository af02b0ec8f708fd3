#!/usr/bin/env python3
"""Sends reviews to a webhook at a steady rate; a process of its own. Standard library alone.

    load.py PORT CA NAME REVIEW RATE SECONDS CONNECTIONS    prints JSON

Arrivals are fixed beforehand and a latency counts from its arrival, so that a server that falls behind shows
it. RATE 0: each connection sends its next review when it has the last one's answer.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from pathlib import Path


class Line:
    """One kept connection."""

    def __init__(self, port: int, trusted: ssl.SSLContext, name: str) -> None:
        plain = socket.create_connection(("127.0.0.1", port), 10)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tls = trusted.wrap_socket(plain, server_hostname=name)

    def post(self, request: bytes) -> bool:
        """Sends one review; whether the answer carries a patch."""
        self.tls.sendall(request)
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._more()
        head, _, body = got.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        parts, left = [body], int(fields[b"content-length"]) - len(body)
        while left > 0:
            parts.append(self._more())
            left -= len(parts[-1])
        return b" 200 " in head[:20] and b'"patch"' in b"".join(parts)

    def _more(self) -> bytes:
        piece = self.tls.recv(1 << 16)
        if not piece:
            raise OSError("the server closed the connection")
        return piece


def main(words: list[str]) -> None:
    """Runs and prints."""
    port, name, rate, seconds, connections = (
        int(words[0]),
        words[2],
        float(words[4]),
        float(words[5]),
        int(words[6]),
    )
    body = Path(words[3]).read_bytes()
    head = f"POST /mutate HTTP/1.1\r\nHost: {name}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    trusted = ssl.create_default_context(cafile=words[1])
    lines = [Line(port, trusted, name) for _ in range(connections)]
    for line in lines:
        line.post(request)
    number, lock, took, errors = iter(range(10**9)), threading.Lock(), [], []
    begin = time.perf_counter() + 0.2

    def work(line: Line) -> None:
        while True:
            with lock:
                arrival = begin + next(number) / rate if rate else max(begin, time.perf_counter())
            if arrival >= begin + seconds:
                return
            time.sleep(max(0.0, arrival - time.perf_counter()))
            try:
                good = line.post(request)
            except OSError as error:
                errors.append(str(error))
                return
            took.append((time.perf_counter() - arrival) * 1e3)
            if not good:
                errors.append("no patch")

    threads = [threading.Thread(target=work, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begin
    took.sort()
    cut = [took[min(len(took) - 1, int(len(took) * share))] for share in (0.5, 0.99)] if took else [0.0, 0.0]
    own = time.process_time()
    print(
        json.dumps(
            {
                "done": len(took),
                "rate": len(took) / spent,
                "p50": cut[0],
                "p99": cut[1],
                "errors": len(errors),
                "load_processor": own,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
