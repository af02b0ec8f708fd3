"""What a region file says, as plain data, and why one is not read; isolator/region.py reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from isolator._core import lib
from isolator.errors import ContractError


class Why(StrEnum):
    """Why a file is not read as a region."""

    NOT_REGULAR = "not_regular"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    TOO_BIG = "too_big"
    NOT_REGION = "not_region"
    OLD_LAYOUT = "old_layout"
    TRANSITIONAL = "transitional"
    VERSION = "version"
    UNFINISHED = "unfinished"
    BAD_COUNT = "bad_count"
    CHANGING = "changing"
    SLOW = "slow"


class RegionError(ContractError):
    """A file is no region that can be read; `why` says which way."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True)
class Device:
    """One device of a container: its UUID; bytes, summed over the live processes.

    `refused` counts refusals, `refused_bytes` is what the last one asked for and `refused_last` when (s
    since the epoch, None: never). `sm_limit` is percent, 0: none; `sm_util` is percent of the device, None
    where nobody measures it (our library does not). `damaged` names the fields that hold
    what no card can hold, most often an underflow: such a word counts as 0 and must not be shown.
    """

    index: int
    uuid: str
    limit: int
    used: int
    context: int
    data: int
    refused: int
    module: int = 0
    peak: int = 0
    sm_limit: int = 0
    sm_util: int | None = None
    refused_last: float | None = None
    refused_bytes: int = 0
    damaged: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Process:
    """One live process: its id in the container's PID namespace, and bytes by device index."""

    slot: int
    pid: int
    used: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """What one region file says. `extended` is false for a file of HAMi-core: no refusals, no state.

    `devices` has those with a valid UUID, `invalid_uuids` counts the others. `processes` are alive in
    our files (they hold a lock); in HAMi-core's they only said so last. `created` and
    `last_kernel_time` are s since the epoch, None where unknown; `refuse_reason` is an errno, 0: none.
    """

    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    extended: bool
    state: int
    flags: int
    version: str = "1.2"
    created: float | None = None
    last_kernel_time: float | None = None
    refuse_reason: int = 0
    invalid_uuids: int = 0

    @property
    def tampered(self) -> bool:
        """Whether the library found a limit or quota word that it had not written."""
        return bool(self.flags & lib.VGPU_FLAG_TAMPERED)

    @property
    def sm_unenforced(self) -> bool:
        """Whether an SM limit is asked for and nothing enforces it."""
        return bool(self.flags & lib.VGPU_FLAG_SM_UNENFORCED)
