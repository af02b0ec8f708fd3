"""The server's TLS context: its pair is exchanged while it serves, a connection keeps what it began with."""

from __future__ import annotations

import os
import ssl
from typing import Any, Final

from isolator.errors import ContractError

_MFD_NOEXEC_SEAL: Final = 8  # linux/memfd.h; Python has no name for it


def _no_passphrase() -> str:
    raise ValueError("the private key is encrypted")


def _memory_file() -> int:
    """A descriptor of a file in memory, also where the kernel allows only ones that cannot be executed."""
    try:
        return os.memfd_create("pair", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # kernels before 6.3 do not know the flag
        return os.memfd_create("pair", os.MFD_CLOEXEC)


def context(certificate: bytes, key: bytes) -> ssl.SSLContext:
    """A server's context with one PEM pair. Raises ContractError where certificate and key do not fit."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.set_alpn_protocols(["http/1.1"])
    # OpenSSL wants a path; a file in memory keeps the key off the disk and needs no writable folder.
    with os.fdopen(_memory_file(), "wb") as pair:
        pair.write(certificate.rstrip() + b"\n" + key)
        pair.flush()
        try:
            made.load_cert_chain(f"/proc/self/fd/{pair.fileno()}", password=_no_passphrase)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).replace("_", " ").lower()
            raise ContractError(f"certificate and key cannot be used: {reason}") from error
        except ValueError as error:
            raise ContractError(f"certificate and key cannot be used: {error}") from error
    return made


class ReloadingContext(ssl.SSLContext):
    """A context that hands each new connection to the pair loaded last.

    Loading into one OpenSSL context would keep an old pair of another key type beside the new one, and a pair
    that does not fit would already have replaced half of the old one.
    """

    _current: ssl.SSLContext

    def __new__(cls, *pair: bytes) -> ReloadingContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, certificate: bytes, key: bytes) -> None:
        self.load(certificate, key)

    def load(self, certificate: bytes, key: bytes) -> None:
        """Serves this PEM pair from the next connection on.

        Raises ContractError where certificate and key do not fit; the pair before stays.
        """
        self._current = context(certificate, key)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Called for each connection by asyncio."""
        return self._current.wrap_bio(*arguments, **options)
