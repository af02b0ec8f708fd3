"""The library as a later release might have it, with another layout of the region's extension."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import tempfile
from pathlib import Path

import loaderbuild
from loaderbuild import GLIBC, KEPT, ROOT, cffi_build
from rootfs import locked


@functools.cache
def library(version: int) -> Path:
    """libvgpu.so of this checkout whose extension has that VGPU_EXT_VERSION; compiled once for all tests."""
    [product] = [each for each in cffi_build.products("lib/x86_64") if each.soname == "libvgpu.so"]
    folders = {source.parent for source in product.sources}
    inputs = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
    known = hashlib.sha256(str(version).encode() + b"".join(path.read_bytes() for path in inputs))
    copy = KEPT / f"skew-{known.hexdigest()[:16]}"
    header = copy / "native/core/region.h"
    with locked(copy.with_suffix(".lock")):
        if not copy.exists():
            _copy(inputs, copy, version)
    flags = [word.replace("-Inative/", f"-I{(copy / 'native').relative_to(ROOT)}/") for word in product.flags]
    sources = [str((copy / source.relative_to(ROOT)).relative_to(ROOT)) for source in product.sources]
    words = [
        *flags,
        *sources,
        "-shared",
        "-Wl,-soname,libvgpu.so",
        "-Wl,-Bsymbolic",
        "-s",
        *cffi_build.SYSTEM,
    ]
    return loaderbuild._kept("libvgpu.so", GLIBC["x86_64"], words, [header])


def _copy(inputs: list[Path], copy: Path, version: int) -> None:
    """The sources at `copy`, with another VGPU_EXT_VERSION; there as a whole or not at all."""
    with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
        fresh = Path(scratch) / "fresh"
        for path in inputs:
            place = fresh / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        header = fresh / "native/core/region.h"
        text, count = re.subn(r"(#define VGPU_EXT_VERSION) \d+", rf"\1 {version}", header.read_text())
        assert count == 1
        header.write_text(text)
        fresh.rename(copy)
