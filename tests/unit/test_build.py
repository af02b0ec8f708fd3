"""The build: what is compiled again and when, what the wheel carries, what a missing header says."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from isolator import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build description, at work in a small tree of its own with two sources."""
    spec = importlib.util.spec_from_file_location("cffi_build_under_test", ROOT / "native" / "cffi_build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    # One zig cache for all: its start takes seconds.
    zig = module.BUILD / "zig"
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "BUILD", tmp_path / "build")
    (tmp_path / "build").mkdir()
    zig.mkdir(parents=True, exist_ok=True)
    (tmp_path / "build" / "zig").symlink_to(zig)
    (tmp_path / "one.h").write_text("int one(void);\n")
    (tmp_path / "one.c").write_text('#include "one.h"\nint one(void) { return 1; }\n')
    (tmp_path / "two.c").write_text("int two(void);\nint two(void) { return 2; }\n")
    return module


@pytest.fixture
def commands(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were compiled or linked since the list was last cleared."""
    seen: list[str] = []
    run = build._run

    def note(command: list[str]) -> None:
        seen.append(Path(command[command.index("-o") + 1]).name)
        run(command)

    monkeypatch.setattr(build, "_run", note)
    return seen


def _make(build: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    sources = [build.ROOT / "one.c", build.ROOT / "two.c"]
    product = build.Product("lib/libx.so", "x86_64", sources, [*build.COMMON, *flags], "libx.so")
    monkeypatch.setattr(build, "products", lambda only: [product])
    errors: list[str] = build.build(build.ROOT / "package")
    return errors


def test_builds_again_only_what_changed(
    build: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, one object, or all of them are compiled: by content of source, header and flags."""
    assert _make(build, monkeypatch) == []
    assert sorted(commands) == ["libx.so", f"{build.ROOT.name}_one.c.o", f"{build.ROOT.name}_two.c.o"]
    first = (build.ROOT / "package" / "lib" / "libx.so").stat().st_ino

    commands.clear()
    os.utime(build.ROOT / "one.c")
    assert _make(build, monkeypatch) == []
    assert commands == []
    assert (build.ROOT / "package" / "lib" / "libx.so").stat().st_ino == first

    (build.ROOT / "one.h").write_text("int one(void);\n#define MORE 1\n")
    assert _make(build, monkeypatch) == []
    assert commands[0] == f"{build.ROOT.name}_one.c.o"
    assert f"{build.ROOT.name}_two.c.o" not in commands

    commands.clear()
    assert _make(build, monkeypatch, "-DOTHER") == []
    assert len([name for name in commands if name.endswith(".o")]) == 2


def test_a_running_program_keeps_the_library_it_has_mapped(
    build: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuilt library takes its place by rename: the old file's bytes are never written over."""
    assert _make(build, monkeypatch) == []
    target = build.ROOT / "package" / "lib" / "libx.so"
    with open(target, "rb") as mapped:
        before = mapped.read()
        (build.ROOT / "two.c").write_text("int two(void);\nint two(void) { return 22; }\n")
        assert _make(build, monkeypatch) == []
        mapped.seek(0)
        assert mapped.read() == before
    assert target.read_bytes() != before
    assert list(target.parent.iterdir()) == [target]


def test_an_error_names_its_product_and_keeps_the_old_one(
    build: ModuleType, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that does not compile leaves the last good library where it was."""
    assert _make(build, monkeypatch) == []
    target = build.ROOT / "package" / "lib" / "libx.so"
    before = target.read_bytes()
    good = (build.ROOT / "two.c").read_text()
    (build.ROOT / "two.c").write_text("int two(void) { return }\n")
    (error,) = _make(build, monkeypatch)
    assert error.startswith("lib/libx.so: ")
    assert "two.c:1" in error
    assert target.read_bytes() == before
    (build.ROOT / "two.c").write_text(good)
    assert _make(build, monkeypatch) == []


def test_a_missing_vendor_header_is_one_clear_line(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the header packages the build says which one to install."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build, "ROOT", ROOT)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert build.build(ROOT / "no-such-folder", "sim") == [
        "the simulator needs cuda.h: pip install 'nvidia-cuda-runtime==13.0.*'"
    ]


def test_version_has_one_source(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package, metadata and the C side carry the version of isolator/__init__.py."""
    monkeypatch.setattr(build, "ROOT", ROOT)
    assert build.version() == __version__ == importlib.metadata.version("kai-resource-isolator")
    stated = f'-DISOLATOR_VERSION="{__version__}"'
    assert [product.output for product in build.products() if stated not in product.flags] == []
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]


@pytest.mark.slow
def test_wheel_carries_everything_a_user_needs(tmp_path: Path) -> None:
    """The wheel has both libraries, the runnable simulator and an extension for any later Python."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", "temp.*", "lib.*", "lib", "sim", "_core*", "zig"
    )
    shutil.copytree(ROOT, tree, ignore=skip, symlinks=True)
    if (ROOT / "build" / "native" / "zig").is_dir():
        (tree / "build" / "native").mkdir(parents=True, exist_ok=True)
        (tree / "build" / "native" / "zig").symlink_to(ROOT / "build" / "native" / "zig")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "-w", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"kai_resource_isolator-{__version__}-cp311-abi3-")
    with zipfile.ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    needed = ["lib/x86_64/libvgpu.so", "lib/aarch64/libvgpu.so", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1"]
    needed += ["sim/nvidia-smi", "sim/old/libcuda.so.1", "_core.abi3.so", "py.typed", "names.py"]
    needed += ["monitor/status.html", "monitor/status.css"]
    assert [name for name in needed if f"isolator/{name}" not in modes] == []
    assert modes["isolator/sim/nvidia-smi"] & 0o111
    assert [name for name in modes if not name.startswith(("isolator/", "kai_resource_isolator-"))] == []


def test_a_container_tool_that_is_not_there_is_named() -> None:
    """One line, before anything is built."""
    env = os.environ | {"CONTAINER_TOOL": "no-such-tool"}
    done = subprocess.run([ROOT / ".ci/image"], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "image: CONTAINER_TOOL is no-such-tool, which is not on PATH:"
        " install it, or name docker, podman or buildah"
    ]
