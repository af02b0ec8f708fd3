"""Sizes told by images: cubins and PTX text, well-formed and not."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

MIB = 1 << 20


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The reader of images as a library of its own."""
    library = tmp_path_factory.mktemp("image") / "image.so"
    source = ROOT / "native" / "shim" / "image.c"
    command = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.image_bytes.restype = loaded.image_file_bytes.restype = ctypes.c_uint64
    return loaded


def cubin(*sections: tuple[bytes, int, int], machine: int = 190) -> bytes:
    """An ELF file of (name, flags, size) sections; those without bits have none."""
    names = b"\0" + b"".join(name + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    rows, at = [bytes(64)], 1
    for name, flags, size in sections:
        rows.append(struct.pack("<IIQQQQIIQQ", at, 8, flags, 0, 0, size, 0, 0, 1, 0))
        at += len(name) + 1
    table = 64 + len(names) + -len(names) % 8
    rows.append(struct.pack("<IIQQQQIIQQ", at, 3, 0, 0, 64, len(names), 0, 0, 1, 0))
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHH", 2, machine, 1, 0, 0, table, 0, 64, 0, 0)
    header += struct.pack("<HHH", 64, len(rows), len(rows) - 1)
    return (header + names).ljust(table, b"\0") + b"".join(rows)


ALLOC = 2
IMAGE = cubin(
    (b".text.k", ALLOC, 4096),
    (b".nv.global", ALLOC | 1, 64 * MIB),
    (b".nv.shared.k", ALLOC, 48 * 1024),
    (b".debug", 0, 10 * MIB),
)

PTX = [
    (".global .align 4 .b8 a[1048576];", MIB),
    (".visible .global .align 16 .v4 .f32 a[1024];", 16 * 1024),
    (".global .u32 a[16][64];", 4096),
    (".global .u64 a;", 8),
    (".global .align 4 .u32 a[4] = {1, 2, 3, 4};\n.global .s16 b [ 8 ];", 32),
    (".extern .global .align 4 .b8 a[1048576];", 0),
    (".entry k(.param .u64 .ptr .global .align 4 p) { ld.global.u32 %r1, [p]; }", 0),
    (".global .texref t;", 0),
    (".global .attribute(.managed) .align 4 .b8 a[4096];", 4096),
    (".global .b8 a[99999999999999999999999999][99999999999];", 0),
    (".global", 0),
    (".global .align", 0),
    (".global .b8 a[", 0),
]


@pytest.mark.parametrize(("text", "size"), PTX)
def test_globals_of_ptx(sizes: ctypes.CDLL, text: str, size: int) -> None:
    """The bytes of a PTX text are those of its global variables (D3)."""
    image = f"//\n.version 8.0\n.target sm_90\n{text}\n".encode()
    assert sizes.image_bytes(ctypes.c_char_p(image)) == size


def test_sections_of_a_cubin(sizes: ctypes.CDLL, tmp_path: Path) -> None:
    """The bytes of a cubin are its allocated sections, shared memory excepted (D3)."""
    assert sizes.image_bytes(ctypes.c_char_p(IMAGE)) == 64 * MIB + 4096
    path = tmp_path / "k.cubin"
    path.write_bytes(IMAGE)
    assert sizes.image_file_bytes(str(path).encode()) == 64 * MIB + 4096
    path.write_text(".version 8.0\n.global .b8 a[4096];\n")
    assert sizes.image_file_bytes(str(path).encode()) == 4096
    assert sizes.image_bytes(ctypes.c_char_p(cubin((b".text", ALLOC, 4096), machine=62))) == 0


@pytest.mark.parametrize("content", [b"", b"\x7f", b"\x7fELF", b"\x50\xed\x55\xba" + bytes(60), bytes(64)])
def test_other_files_tell_nothing(sizes: ctypes.CDLL, tmp_path: Path, content: bytes) -> None:
    """Empty, short and unknown files have no size, and neither have paths without a file (D3)."""
    path = tmp_path / "image"
    path.write_bytes(content)
    assert sizes.image_file_bytes(str(path).encode()) == 0
    assert sizes.image_file_bytes(str(tmp_path).encode()) == 0
    assert sizes.image_file_bytes(str(tmp_path / "none").encode()) == 0
    assert sizes.image_file_bytes(None) == sizes.image_bytes(None) == 0


def test_damaged_cubins_do_no_harm(sizes: ctypes.CDLL, tmp_path: Path) -> None:
    """Cut and altered cubins are read within their bounds (D3)."""
    chance, path = random.Random(7), tmp_path / "k.cubin"
    for _ in range(2000):
        damaged = bytearray(IMAGE[: chance.randrange(len(IMAGE) + 1)])
        for _ in range(chance.randrange(4)):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(bytes(damaged))
        sizes.image_file_bytes(str(path).encode())
