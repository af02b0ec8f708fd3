"""The built libvgpu.so as a file: what it exports, what it needs, which glibc it runs on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from isolator.libpath import library

ARCHITECTURES = ("x86_64", "aarch64")
ALLOWED_NEEDED = re.compile(
    r"libc\.so\.6|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|ld-linux-(x86-64|aarch64)\.so\.[12]"
)
# Each of these would end, or change for good, a program that is not ours.
FORBIDDEN = set(
    "__assert_fail abort exit _exit _Exit quick_exit atexit umask signal sigaction system chdir setlocale "
    "setenv putenv unsetenv clearenv printf puts putchar stdout".split()
)

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, libvgpu: Path) -> Path:
    """The library of each architecture."""
    return library(request.param)


def _symbols(path: Path, which: str) -> set[str]:
    done = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in done.stdout.splitlines()}


def _readelf(path: Path, what: str) -> str:
    return subprocess.run(["readelf", "-W", what, path], capture_output=True, text=True, check=True).stdout


def test_exports_only_names_of_the_driver_and_dlsym(path: Path) -> None:
    """No private name can clash with one of the host program."""
    names = _symbols(path, "--defined-only")
    assert "dlsym" in names
    assert {name for name in names if not re.fullmatch(r"cu[A-Z]\w*|nvml[A-Z]\w*|dlsym", name)} == set()


def test_takes_no_driver_function_at_load_time(path: Path) -> None:
    """Programs without a driver start: nothing of cu* or nvml* is left for the loader to find (B021)."""
    names = {name.split("@")[0] for name in _symbols(path, "--undefined-only")}
    assert {name for name in names if re.match(r"cu[A-Z]|nvml[A-Z]", name)} == set()


def test_needs_nothing_but_libc(path: Path) -> None:
    """Neither the driver nor a compiler's runtime library is in NEEDED (B021, B156)."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf(path, "-d"))
    assert needed
    assert [name for name in needed if not ALLOWED_NEEDED.fullmatch(name)] == []


def test_runs_on_glibc_2_17(path: Path) -> None:
    """The newest glibc version asked for is 2.17, so that every tenant image can load it (B150)."""
    versions = {
        tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", _readelf(path, "-V"))
    }
    assert versions
    assert max(versions) <= (2, 17)


def test_never_ends_or_changes_its_host(path: Path) -> None:
    """No function that ends the process or changes its signals, umask or environment is used (B103)."""
    names = {name.split("@")[0] for name in _symbols(path, "--undefined-only")}
    assert names & FORBIDDEN == set()


def test_does_no_work_when_loaded(path: Path) -> None:
    """There are no constructors or destructors: a process that never calls the driver pays nothing (B021)."""
    dynamic = _readelf(path, "-d")
    assert re.findall(r"\((INIT_ARRAY|FINI_ARRAY|PREINIT_ARRAY|INIT|FINI)\)", dynamic) == []


def test_is_hardened_and_page_size_neutral(path: Path) -> None:
    """Relocations are read-only, bound at start, and segments fit 64 KiB pages on aarch64."""
    assert "BIND_NOW" in _readelf(path, "-d")
    segments = _readelf(path, "-l")
    assert "GNU_RELRO" in segments
    assert "RWE" not in segments
    if path.parent.name == "aarch64":
        loads = [line.split()[-1] for line in segments.splitlines() if line.lstrip().startswith("LOAD")]
        assert [align for align in loads if int(align, 16) < 0x10000] == []


def test_has_the_soname_and_machine_of_its_folder(path: Path) -> None:
    """Each folder holds the library of its own architecture, under the soname libvgpu.so."""
    machine = {"x86_64": "X86-64", "aarch64": "AArch64"}[path.parent.name]
    assert machine in _readelf(path, "-h")
    assert "soname: [libvgpu.so]" in _readelf(path, "-d")


def test_programs_start_without_a_driver(libvgpu: Path) -> None:
    """With the library preloaded and no driver anywhere, ordinary programs run, silently (B021)."""
    env = {"LD_PRELOAD": str(libvgpu), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    for command in (["true"], ["bash", "-c", "echo a | cat"], ["env"]):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
