"""Which limit holds in a container? By the library's own order and its own parser."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field

from isolator import names
from isolator._core import ffi, lib
from isolator.doctor.container import Carried
from isolator.doctor.report import Report
from isolator.monitor.words import size

_INDEXED = re.compile(re.escape(names.ENV_MEMORY_LIMIT) + r"(?:_(\d{1,2}))?")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ZERO = re.compile(r"\s*[0.]*0[0.]*\s*[kmgt]?i?b?\s*", re.IGNORECASE)


def parse(raw: bytes) -> tuple[int, int]:
    """(0, bytes) or (errno, 0): ENODATA empty, EINVAL malformed or too small, ERANGE too large."""
    found = ffi.new("uint64_t *")
    code = lib.vgpu_limit_parse(raw, len(raw), found)
    return (-code, 0) if code else (0, int(found[0]))


@dataclass
class Limit:
    """What holds: bytes of the file, and of the environment by device (-1: every device). None: not there."""

    file: int | None = None
    variables: dict[int, int] = field(default_factory=dict)
    usable: bool = True

    def of(self, index: int) -> int | None:
        """The limit of one device, in bytes; None: no limit is known."""
        given = self.variables.get(index, self.variables.get(-1))
        known = [value for value in (self.file, given) if value]
        return min(known) if known else None


def judge(report: Report, carried: Carried) -> Limit:
    """Finds what the limit is, and what is wrong with it."""
    report.check("limit")
    found = Limit()
    path = f"{carried.mount}/{names.LIMIT_FILE}"
    if carried.limit_mount:
        found.file = _file(report, carried, path)
        found.usable = found.file is not None
    if carried.environment is None:
        report.skip("limit of the environment", "its variables may not be read: run as root")
    _variables(report, carried, found)
    if not carried.limit_mount and not found.variables and found.usable and carried.environment is not None:
        found.usable = False
        seen = f"neither {path} nor {names.ENV_MEMORY_LIMIT}"
        if carried.limit_there:
            seen = f"{path} is no read-only mount of its own, so it does not count, and no variable is set"
        report.find("limit_missing", path, seen)
    return found


def _file(report: Report, carried: Carried, path: str) -> int | None:
    try:
        raw = carried.inside.read(path)
    except OSError as error:
        report.find("limit_missing", path, f"it cannot be read: {error.strerror}")
        return None
    return _one(report, path, raw, withheld=True)


def _one(report: Report, subject: str, raw: bytes, withheld: bool = False) -> int | None:
    error, value = parse(raw)
    if not error:
        return value
    text = raw[:80].decode("utf-8", "replace")
    if error == errno.ENODATA:
        report.find("limit_missing", subject, "it is empty")
    elif withheld and _UUID.fullmatch(text.strip()):
        report.find("limit_missing", subject, "the webhook left no limit in it, because KAI gave none")
    elif _ZERO.fullmatch(text):
        report.find("limit_zero", subject, f"it says {text.strip()!r}")
    else:
        why = "too large" if error == errno.ERANGE else "malformed, or under 64 MiB"
        report.find("limit_malformed", subject, f"it says {text.strip()!r}: {why}")
    return None


def _variables(report: Report, carried: Carried, found: Limit) -> None:
    """As the library: the process's own variables, else PID 1's; beside a file a wrong one cannot matter."""
    named = _limits(carried.environment)
    if carried.limit_mount:
        found.variables = of_environment(carried.environment or {})
    if not named and not carried.limit_mount:
        named = _limits(carried.first)
    for name, text in named.items():
        if carried.limit_mount:
            continue
        one = _one(report, f"${name}", text.encode())
        if one is None:
            found.usable = False
        else:
            found.variables[_index(name)] = one
    lowest = min(found.variables.items(), key=lambda item: item[1], default=None)
    if found.file and lowest and lowest[1] < found.file:
        name = names.ENV_MEMORY_LIMIT if lowest[0] < 0 else f"{names.ENV_MEMORY_LIMIT}_{lowest[0]}"
        seen = f"{size(lowest[1])} in place of the file's {size(found.file)}"
        report.find("limit_below_file", f"${name}", seen, variable=name)


def of_environment(variables: dict[str, str]) -> dict[int, int]:
    """The limits that can be understood, in bytes, by device; -1: of every device."""
    found = {}
    for name, text in _limits(variables).items():
        error, value = parse(text.encode())
        if not error:
            found[_index(name)] = value
    return found


def _index(name: str) -> int:
    known = _INDEXED.fullmatch(name)
    return int(known[1]) if known and known[1] else -1


def _limits(variables: dict[str, str] | None) -> dict[str, str]:
    return {
        name: text
        for name, text in (variables or {}).items()
        if (known := _INDEXED.fullmatch(name)) and text.strip() and int(known[1] or 0) < lib.VGPU_MAX_DEVICES
    }
