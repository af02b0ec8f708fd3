"""The command line: verbs, paths, one-line errors, imports that wait for their verb."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isolator import __version__, cli, libpath
from isolator.errors import NotBuiltError, UsageError


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with a library for each architecture."""
    for arch in ("x86_64", "aarch64"):
        (tmp_path / "lib" / arch).mkdir(parents=True)
        (tmp_path / "lib" / arch / "libvgpu.so").touch()
    monkeypatch.setattr(libpath, "_PACKAGE", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "arch"),
    [
        ("x86_64", "x86_64"),
        ("amd64", "x86_64"),
        ("aarch64", "aarch64"),
        ("arm64", "aarch64"),
        ("ARM64", "aarch64"),
    ],
)
def test_libpath_knows_both_names_of_an_architecture(
    capsys: pytest.CaptureFixture[str], package: Path, asked: str, arch: str
) -> None:
    """Kernel and container names of an architecture give the same library."""
    assert _run(capsys, "libpath", "--arch", asked) == (0, f"{package}/lib/{arch}/libvgpu.so\n", "")


def test_libpath_defaults_to_this_machine(
    capsys: pytest.CaptureFixture[str], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --arch the library is the one this machine can load."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert _run(capsys, "libpath") == (0, f"{package}/lib/aarch64/libvgpu.so\n", "")


def test_libpath_refuses_an_unknown_architecture_in_one_line(
    capsys: pytest.CaptureFixture[str], package: Path
) -> None:
    """An architecture that we do not build for is a usage error that lists the known ones."""
    status, out, err = _run(capsys, "libpath", "--arch", "riscv64")
    assert (status, out) == (2, "")
    assert err == "isolator: no library for architecture 'riscv64' (known: x86_64, amd64, aarch64, arm64)\n"


def test_libpath_says_when_the_library_is_not_built(
    capsys: pytest.CaptureFixture[str], package: Path
) -> None:
    """A missing library is an error that names the file and the way to make it."""
    missing = package / "lib" / "x86_64" / "libvgpu.so"
    missing.unlink()
    status, out, err = _run(capsys, "libpath", "--arch", "amd64")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"isolator: {missing} is missing: run 'make build'")


@pytest.mark.parametrize("arguments", [["nope"], ["libpath", "--nope"], ["demo", "--gpu", "quantum"]])
def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """What cannot be understood is one line on standard error and exit status 2."""
    status, out, err = _run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("isolator: ")


def test_version_is_the_one_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the version alone."""
    assert _run(capsys, "--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(("gpu", "limit", "status"), [("sim", "4147m", 0), ("real", "2Gi", 1)])
def test_demo_passes_its_options_and_its_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: str, limit: str, status: int
) -> None:
    """The demo's verdict is the exit status of the command."""
    asked: list[tuple[str, str]] = []

    class Demo:
        @staticmethod
        def run(gpu: str, limit: str) -> int:
            asked.append((gpu, limit))
            return status

    monkeypatch.setitem(sys.modules, "isolator.demo", Demo)
    assert _run(capsys, "demo", "--gpu", gpu, "--limit", limit)[0] == status
    assert asked == [(gpu, limit)]


def test_verbs_import_only_what_they_need() -> None:
    """Asking for a path loads neither the demo nor the extension."""
    code = (
        "import sys; from isolator.cli import main\n"
        "try: main(['libpath', '--arch', 'amd64'])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m in ('isolator.demo', 'isolator._core', 'cffi')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_simulator_is_made_executable_where_its_mode_was_lost(tmp_path: Path, package: Path) -> None:
    """An installer that drops file modes does not break nvidia-smi of the simulated GPU."""
    program = package / "sim" / "nvidia-smi"
    program.parent.mkdir()
    program.touch(mode=0o644)
    assert libpath.simulator() == program.parent
    assert program.stat().st_mode & 0o777 == 0o755


def test_libpath_errors_have_meaning(package: Path) -> None:
    """Callers in Python can tell a wrong architecture from an incomplete installation."""
    with pytest.raises(UsageError):
        libpath.library("sparc")
    with pytest.raises(NotBuiltError):
        libpath.simulator()
