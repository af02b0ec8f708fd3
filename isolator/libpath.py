"""Where the built libraries are: the one for tenants, by architecture, and the simulated GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from isolator.errors import NotBuiltError, UsageError

_PACKAGE = Path(__file__).resolve().parent
_ALIASES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def architecture(name: str | None = None) -> str:
    """The product's name of an architecture (this machine's by default)."""
    asked = platform.machine() if name is None else name
    try:
        return _ALIASES[asked.lower()]
    except KeyError:
        known = ", ".join(_ALIASES)
        raise UsageError(f"no library for architecture {asked!r} (known: {known})") from None


def library(arch: str | None = None) -> Path:
    """The libvgpu.so of `arch` (this machine's by default)."""
    path = _PACKAGE / "lib" / architecture(arch) / "libvgpu.so"
    if not path.is_file():
        raise NotBuiltError(f"{path} is missing: run 'make build', or install the wheel again")
    return path


def simulator() -> Path:
    """The folder of the simulated GPU: libcuda.so.1, libnvidia-ml.so.1 and nvidia-smi."""
    folder = _PACKAGE / "sim"
    program = folder / "nvidia-smi"
    if not program.is_file():
        raise NotBuiltError(f"{program} is missing: run 'make build', or install the wheel again")
    # Some installers unpack a wheel without its file modes.
    if not os.access(program, os.X_OK) and os.access(folder, os.W_OK):
        program.chmod(0o755)
    return folder
