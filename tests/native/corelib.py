"""The core library for tests: regions that raise OSError, and clients that hold one elsewhere."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from isolator._core import ffi, lib

MIB = 1 << 20
GIB = 1 << 30
LIMIT = 4 * GIB
READ, CREATE = lib.VGPU_OPEN_READ, lib.VGPU_OPEN_CREATE
DATA, CONTEXT, MODULE = lib.VGPU_KIND_DATA, lib.VGPU_KIND_CONTEXT, lib.VGPU_KIND_MODULE
EXT = lib.VGPU_EXT_OFFSET

# Scales the long tests: 1 is what `make test` runs.
SCALE = float(os.environ.get("CORE_ROUNDS", "1"))


def rounds(count: int) -> int:
    """`count` scaled by $CORE_ROUNDS."""
    return max(1, int(count * SCALE))


def check(rc: int) -> int:
    """`rc`, or the OSError it stands for."""
    if rc < 0:
        raise OSError(-rc, f"{errno.errorcode.get(-rc, rc)}: {os.strerror(-rc)}")
    return rc


class Core:
    """One handle on a region; without a path in private memory."""

    def __init__(
        self, path: Path | str | None = None, mode: int = CREATE, instance: int = 1, claim: bool = False
    ) -> None:
        out = ffi.new("vgpu_core **")
        if path is None:
            check(lib.vgpu_core_open_private(out))
        else:
            check(lib.vgpu_core_open(out, os.fsencode(path), mode, instance))
        self.handle = out[0]
        if claim:
            self.claim()

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle; a second time does nothing."""
        if self.handle is not None:
            lib.vgpu_core_close(self.handle)
            self.handle = None

    def claim(self) -> int:
        """Take a slot and return its number."""
        check(lib.vgpu_core_claim(self.handle))
        return self.slot

    @property
    def slot(self) -> int:
        """Number of the slot, or -1."""
        return lib.vgpu_core_slot(self.handle)

    @property
    def region(self) -> Any:
        """HAMi's part, as mapped."""
        return lib.vgpu_core_region(self.handle)

    @property
    def ext(self) -> Any:
        """Our part, as mapped."""
        return lib.vgpu_core_ext(self.handle)

    @property
    def creator(self) -> bool:
        """Whether this handle made the file."""
        return bool(lib.vgpu_core_is_creator(self.handle))

    def limit(self, size: int, device: int = 0) -> None:
        """Set this process's limit and record it."""
        lib.vgpu_core_set_limit(self.handle, device, size)
        lib.vgpu_core_record_limit(self.handle, device, size)

    def charge(self, size: int, device: int = 0, kind: int = DATA) -> bool:
        """Charge; False when refused."""
        rc = lib.vgpu_charge(self.handle, device, size, kind)
        return rc != -errno.ENOMEM and check(rc) == 0

    def force(self, size: int, device: int = 0, kind: int = DATA) -> None:
        """Charge what cannot be undone."""
        lib.vgpu_charge_forced(self.handle, device, size, kind)

    def give_back(self, size: int, device: int = 0, kind: int = DATA) -> None:
        """Give back."""
        lib.vgpu_give_back(self.handle, device, size, kind)

    def used(self, device: int = 0) -> int:
        """Bytes of the whole container."""
        return lib.vgpu_used(self.handle, device)

    def own(self, device: int = 0) -> int:
        """Bytes of this process."""
        return lib.vgpu_used_own(self.handle, device)

    def sweep(self) -> int:
        """Free dead slots now."""
        return lib.vgpu_core_sweep(self.handle, 1)

    def live(self, slot: int) -> bool:
        """Whether the slot's process lives."""
        return bool(lib.vgpu_core_slot_live(self.handle, slot))


def refusal(path: Path | str, mode: int = CREATE) -> str:
    """Name of the error that opening ends with; empty when it opens."""
    try:
        Core(path, mode).close()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def forge(core: Core, slot: int, pid: int, started: int, size: int = GIB) -> None:
    """Writes an unlocked slot that claims to be of `pid`."""
    core.region.procs[slot].pid = pid
    core.region.procs[slot].status = 1
    core.ext.info[slot].start_time = started
    core.ext.info[slot].pid_ns = os.stat("/proc/self/ns/pid").st_ino
    core.ext.word[0][slot] = size // 4096
    core.ext.slot_high = max(core.ext.slot_high, slot + 1)


_CLIENT = """
import os, sys
sys.path[:0] = {path!r}
from corelib import *
for line in sys.stdin:
    try:
        answer = eval(line)
    except SyntaxError:
        exec(line)
        answer = None
    except OSError as error:
        answer = error.errno and -error.errno
    print(repr(answer), flush=True)
"""


class Client:
    """A Python process that answers expressions: `client("core.charge(5)")`. Statements answer None."""

    def __init__(self, *before: str) -> None:
        code = _CLIENT.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[2])])
        command = [*before, sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self("os.getpid()")

    def __call__(self, line: str) -> Any:
        to, back = self.process.stdin, self.process.stdout
        assert to is not None and back is not None
        print(line, file=to, flush=True)
        answer = back.readline()
        assert answer, f"client died at {line}: {self.process.poll()}"
        return eval(answer)

    def join(self, path: Path | str, limit: int = 0) -> int:
        """Open and claim in the client's global `core`; its slot."""
        self(f"core = Core({os.fspath(path)!r})")
        if limit:
            self(f"core.limit({limit})")
        return int(self("core.claim()"))

    def end(self) -> None:
        """Kill it and wait."""
        self.process.kill()
        self.process.wait()
        pipes: tuple[IO[str] | None, ...] = (self.process.stdin, self.process.stdout)
        for pipe in pipes:
            if pipe is not None:
                pipe.close()


@contextmanager
def client(*before: str) -> Iterator[Client]:
    """A client that is ended with the block."""
    made = Client(*before)
    try:
        yield made
    finally:
        made.end()
