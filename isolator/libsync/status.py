"""<mount>/libsync.json: what the installer found and did, for the monitor of the same node."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from isolator.libsync import files
from isolator.names import LIBSYNC_STATUS

SCHEMA: Final = 1
MODE: Final = 0o644


@dataclass
class Status:
    """Times are seconds since the epoch; the counts of repairs and removals are since `agent_started`.

    `ready`: library, preload file and cache folder were read back and are right. `problem`: one line.
    """

    node: str
    agent_started: float
    schema: int = SCHEMA
    library_version: str | None = None
    library_sha256: str | None = None
    installed_at: float | None = None
    verified_at: float | None = None
    ready: bool = False
    problem: str | None = None
    repairs: int = 0
    caches: int = 0
    removed_caches: int = 0
    oversized_caches: int = 0
    removed_foreign_files: int = 0

    def write(self, fd: int) -> None:
        """Puts the file into the folder of descriptor `fd` in one step."""
        # Made again at each pass, so not worth waiting for the disk.
        files.write(fd, LIBSYNC_STATUS, (json.dumps(asdict(self)) + "\n").encode(), MODE, durable=False)


def read(fd: int) -> dict[str, Any]:
    """The file as another run left it; empty where there is none or it is not ours to understand."""
    got = files.read(fd, LIBSYNC_STATUS)
    try:
        found = json.loads(got[0]) if got else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}
