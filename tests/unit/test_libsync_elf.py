"""What the installer reads out of a library, and which libraries it refuses."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from libsync_node import MACHINE

from isolator.errors import ContractError
from isolator.libpath import library
from isolator.libsync import elf, install


@pytest.fixture(scope="module")
def data() -> bytes:
    return library().read_bytes()


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_both_built_libraries_fit_the_floor(arch: str) -> None:
    """B150, B153, B156: glibc 2.17 and nothing but libc, on both architectures."""
    found = elf.check(library(arch).read_bytes(), arch)
    assert (arch, "libvgpu.so") == (found.machine, found.soname)
    assert found.glibc is not None and found.glibc <= (2, 17)
    assert "libc.so.6" in found.needed


def test_the_reader_agrees_with_readelf(data: bytes, tmp_path: Path) -> None:
    """The newest version is the newest that binutils lists, for a library built here too."""
    import re
    import shutil
    import subprocess

    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    for path in (library(), Path("/bin/sh").resolve(), Path("/bin/cat").resolve()):
        listed = subprocess.run(["readelf", "-WV", path], capture_output=True, text=True, check=True).stdout
        versions = [tuple(map(int, pair)) for pair in re.findall(r"Name: GLIBC_(\d+)\.(\d+)", listed)]
        assert max(versions) == elf.read(path.read_bytes()).glibc


def test_a_library_of_another_architecture_is_refused_by_name(data: bytes) -> None:
    """B153: the line names both architectures."""
    other = "aarch64" if MACHINE == "x86_64" else "x86_64"
    with pytest.raises(ContractError, match=f"built for {MACHINE}, but this node is {other}"):
        elf.check(data, other)


def test_a_library_that_needs_a_newer_glibc_is_refused_by_name(data: bytes) -> None:
    """B150: the needed version is in the line."""
    with pytest.raises(ContractError, match=r"needs GLIBC_2\.99, but tenants may have 2\.17"):
        elf.check(data.replace(b"GLIBC_2.17", b"GLIBC_2.99"), MACHINE)


def test_a_library_that_needs_another_library_is_refused(data: bytes) -> None:
    """B156: a missing library ends every program with 127."""
    with pytest.raises(ContractError, match=r"needs libzz\.so\.2"):
        elf.check(data.replace(b"libdl.so.2", b"libzz.so.2"), MACHINE)


def test_a_program_and_an_object_are_not_libraries(data: bytes) -> None:
    """The type is checked, not only the magic."""
    for kind, word in ((2, "program"), (1, "relocatable object"), (77, "unknown type")):
        with pytest.raises(ContractError, match=word):
            elf.check(data[:16] + struct.pack("<H", kind) + data[18:], MACHINE)


def test_foreign_and_32_bit_files_are_refused(data: bytes) -> None:
    """Each with a reason of its own."""
    for wrong, reason in (
        (b"", "empty"),
        (b"#!/bin/sh\n" * 50, "not an ELF"),
        (data[:4] + b"\1" + data[5:], "64-bit"),
        (data[:5] + b"\2" + data[6:], "little-endian"),
    ):
        with pytest.raises(ContractError, match=reason):
            elf.check(wrong, MACHINE)


def test_every_truncation_is_noticed(data: bytes) -> None:
    """Whatever the length that a broken copy stopped at."""
    for length in [*range(0, 2000, 37), *range(2000, len(data), 4999), len(data) - 1]:
        with pytest.raises(ContractError):
            elf.check(data[:length], MACHINE)


def test_damaged_bytes_are_an_answer_or_a_clean_refusal(data: bytes) -> None:
    """Random damage never ends in another exception or a hang."""
    chance = random.Random(7)
    head = len(data) // 20
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(chance.randrange(1, 20)):
            broken[chance.randrange(head if chance.random() < 0.8 else len(data))] = chance.randrange(256)
        try:
            elf.check(bytes(broken), MACHINE)
        except ContractError as error:
            assert "\n" not in str(error)


def test_a_bad_library_in_the_image_says_what_to_do(tmp_path: Path, data: bytes) -> None:
    """The line names the file and the way out."""
    path = tmp_path / "libvgpu.so"
    path.write_bytes(data[:5000])
    with pytest.raises(
        ContractError, match=r"libvgpu\.so\) cannot be used: truncated.*pull or build the image"
    ):
        install.load(path, MACHINE, "1.2.0")
    with pytest.raises(ContractError, match="No such file"):
        install.load(tmp_path / "none", MACHINE, "1.2.0")
