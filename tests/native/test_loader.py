"""The library in /etc/ld.so.preload of old, current, new and foreign systems: programs do not notice it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import rootfs
from loaderbuild import GLIBC, client, musl_client

pytestmark = pytest.mark.root

PYTHON = """
import os, sys
pid = os.fork() if sys.argv[1:] else 0
if pid:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if hasattr(os, 'waitstatus_to_exitcode') else 5)
print(sys.version_info[:2], sorted(os.environ), os.listdir('/proc/self/fd') and len(sys.modules))
sys.stderr.write('to stderr\\n')
os._exit(5)
""".strip()

# A shell runs other programs of its root, so those start with the library too.
PROGRAMS = {
    "sh": ["/bin/sh", "-c", "echo out; echo err >&2; umask; trap; exit 3"],
    "sh pipes": ["/bin/sh", "-c", "echo b a | tr ' ' '\\n' | sort | cat -n; x=$(id -u; pwd); echo $x"],
    "sh killed": ["/bin/sh", "-c", "kill -TERM $$"],
    "bash": ["/bin/bash", "-c", "set -o; coproc cat; shopt; echo ${BASH_VERSINFO[0]}; false"],
    "bash jobs": ["/bin/bash", "-c", "for i in 1 2 3; do (sleep 0.01; exit $i) & wait $!; echo $?; done"],
    "python": ["/usr/bin/python3", "-c", PYTHON],
    "python fork": ["/usr/bin/python3", "-c", PYTHON, "fork"],
    "env": ["/usr/bin/env"],
    "cp": ["/bin/sh", "-c", "cp /etc/passwd /tmp/copy.$$ && cmp /etc/passwd /tmp/copy.$$; rm -v /nowhere"],
    "ls": ["/bin/ls", "-l", "/etc/passwd", "/nowhere"],
    "perl": ["/usr/bin/perl", "-e", "print join(',', sort keys %ENV), $]; warn 'w'; exit 9"],
    "dpkg": ["/usr/bin/dpkg", "--version"],
}
SINGLE = ("sh", "bash", "python", "env", "ls", "perl")  # start no other program: qemu runs one


def _library(name: str, host: Path) -> Path:
    """The library of the root's architecture, beside this machine's."""
    return host.parents[1] / rootfs.MACHINES[rootfs.SUITES[name].arch] / "libvgpu.so"


def _both(
    name: str, host: Path, scratch: Path, argv: list[str], **options: object
) -> list[tuple[int, str, str]]:
    """What a program does without and with the library: status, stdout, stderr."""
    path = _library(name, host)
    results = []
    for preload in ("", rootfs.LIBRARY):
        words = rootfs.command(
            name, argv, preload=preload, binds=[(path, rootfs.LIBRARY)], scratch=scratch, **options
        )
        done = rootfs.run(words)
        results.append((done.returncode, done.stdout, done.stderr))
    return results


def _is_loaded(name: str, host: Path, scratch: Path) -> bool:
    """Control: in this root the preload file does reach programs."""
    path = _library(name, host)
    argv = ["/bin/bash", "-c", "while read -r line; do echo $line; done </proc/self/maps"]
    words = rootfs.command(
        name, argv, preload=rootfs.LIBRARY, binds=[(path, rootfs.LIBRARY)], scratch=scratch
    )
    return rootfs.LIBRARY in rootfs.run(words).stdout


@pytest.mark.parametrize("name", rootfs.NATIVE)
def test_programs_do_the_same_with_the_library(name: str, libvgpu: Path, tmp_path: Path) -> None:
    """Same output and status on glibc 2.31, 2.36 and 2.41, no driver there (B021, B150, B151, B177)."""
    assert rootfs.glibc_of(name) == rootfs.SUITES[name].glibc
    assert _is_loaded(name, libvgpu, tmp_path)
    for label, argv in PROGRAMS.items():
        bare, loaded = _both(name, libvgpu, tmp_path, argv, env={"A": "1"})
        assert loaded == bare, label
    assert _both(name, libvgpu, tmp_path, PROGRAMS["python"], user="1024:1024")[1][0] == 5


def test_arm64_programs_do_the_same_with_the_library(libvgpu: Path, tmp_path: Path) -> None:
    """The aarch64 library loads under its own loader and programs do not notice (B153)."""
    assert _is_loaded("bookworm-arm64", libvgpu, tmp_path)
    for label in SINGLE:
        bare, loaded = _both("bookworm-arm64", libvgpu, tmp_path, PROGRAMS[label], env={"A": "1"})
        assert loaded == bare, label


@pytest.mark.parametrize("name", rootfs.NATIVE)
def test_any_folder_serves(name: str, libvgpu: Path, tmp_path: Path) -> None:
    """The library works from a folder other than its default (B024)."""
    odd = "/opt/odd-dir/libvgpu.so"
    argv = ["/bin/bash", "-c", "echo fine; grep -c /odd-dir/ /proc/$$/maps || read -r line </proc/$$/maps"]
    words = rootfs.command(name, argv, preload=odd, binds=[(libvgpu, odd)], scratch=tmp_path)
    done = rootfs.run(words)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "fine")


def test_node_does_the_same_with_the_library(libvgpu: Path, tmp_path: Path) -> None:
    """Node with a worker thread and a child process does not notice (B021)."""
    node = shutil.which("node") or pytest.skip("needs node")
    script = (
        "const {Worker} = require('worker_threads'); const {spawnSync} = require('child_process');"
        "console.log(spawnSync('sh', ['-c', 'echo child; exit 4']).status);"
        "new Worker('console.log(6 * 7); process.exit(3)', {eval: true})"
        ".on('exit', code => {console.error('worker', code); process.exit(code + 1)})"
    )
    done = [
        rootfs.run(rootfs.host_command([node, "-e", script], preload, tmp_path))
        for preload in ("", str(libvgpu))
    ]
    assert (done[0].returncode, done[0].stdout) == (4, "4\n42\n")
    assert (done[1].returncode, done[1].stdout, done[1].stderr) == (4, done[0].stdout, done[0].stderr)


def test_java_does_the_same_with_the_library(libvgpu: Path, tmp_path: Path) -> None:
    """A Java machine with threads, and a child process of it, do not notice (B021)."""
    java = shutil.which("java") or pytest.skip("needs java")
    source = tmp_path / "Hello.java"
    source.write_text(
        "public class Hello { public static void main(String[] a) throws Exception {"
        " Thread t = new Thread(() -> System.out.println(6 * 7)); t.start(); t.join();"
        ' System.err.println(new ProcessBuilder("sh", "-c", "exit 4").start().waitFor()); System.exit(3); } }'
    )
    listed = subprocess.run([java, "--list-modules"], capture_output=True, text=True).stdout
    argv = [java, str(source)] if "jdk.compiler" in listed else [java, "-version"]
    done = [rootfs.run(rootfs.host_command(argv, preload, tmp_path)) for preload in ("", str(libvgpu))]
    assert (done[1].returncode, done[1].stdout, done[1].stderr) == (
        done[0].returncode,
        done[0].stdout,
        done[0].stderr,
    )
    assert done[0].returncode == (3 if "jdk.compiler" in listed else 0)


def test_static_programs_run(libvgpu: Path, tmp_path: Path) -> None:
    """A static program knows no preload file: it runs as ever."""
    argv = ["/bin/busybox", "sh", "-c", "echo out; echo err >&2; exit 3"]
    bare, loaded = _both("bookworm", libvgpu, tmp_path, argv)
    assert bare == (3, "out\n", "err\n")
    assert loaded == bare


def _hello(scratch: Path, program: Path, preload: str, binds: list[tuple[Path, str]]) -> tuple[int, str, str]:
    binds = [*binds, (program.parent, "/test")]
    words = rootfs.command(
        "bookworm", [f"/test/{program.name}", "there"], preload=preload, binds=binds, scratch=scratch
    )
    done = rootfs.run(words)
    return done.returncode, done.stdout, done.stderr


def test_32_bit_programs_run(libvgpu: Path, tmp_path: Path) -> None:
    """A program of another ABI runs with unchanged output; the loader's one line is on stderr (B155)."""
    rootfs.get("bookworm")
    program = client("loader_hello", GLIBC["x86"])
    status, out, err = _hello(tmp_path, program, rootfs.LIBRARY, [(libvgpu, rootfs.LIBRARY)])
    assert (status, out) == (7, "hello 2 there\n")
    # `env`, a 64-bit program, starts it: the one line is the 32-bit loader's.
    assert "wrong ELF class" in err and len(err.splitlines()) == 1


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_musl_programs_ignore_the_preload_file(libvgpu: Path, tmp_path: Path) -> None:
    """Programs of musl do not read /etc/ld.so.preload: output unchanged, nothing on stderr (B154)."""
    program = tmp_path / "musl" / "hello"
    program.parent.mkdir()
    musl_client("loader_hello", rootfs.get("bookworm"), program)
    result = _hello(tmp_path, program, rootfs.LIBRARY, [(libvgpu, rootfs.LIBRARY)])
    assert result == (7, "hello 2 there\n", "")


@pytest.mark.parametrize("name", rootfs.NATIVE)
@pytest.mark.parametrize("allocator", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"])
def test_allocators_start_beside_the_library(
    name: str, allocator: str, libvgpu: Path, tmp_path: Path
) -> None:
    """jemalloc and tcmalloc in either order with the library: programs start at once (B157)."""
    program = client("loader_early")
    expected = None
    folder = "/usr/lib/x86_64-linux-gnu"
    for first, second in ((allocator, ""), (rootfs.LIBRARY, allocator), (allocator, rootfs.LIBRARY)):
        paths = [path if "/" in path else f"{folder}/{path}" for path in (first, second) if path]
        binds = [(libvgpu, rootfs.LIBRARY), (program.parent, "/test")]
        words = rootfs.command(
            name, ["/test/loader_early"], preload=":".join(paths), binds=binds, scratch=tmp_path
        )
        began = time.monotonic()
        done = rootfs.run(words, timeout=20)
        assert time.monotonic() - began < 2
        expected = expected or done.stdout
        assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_program_with_an_allocator_of_its_own_starts(libvgpu: Path, tmp_path: Path) -> None:
    """jemalloc linked into the program: start-up look-ups do not lock up in it (B157)."""
    archive = rootfs.get("bookworm") / "usr/lib/x86_64-linux-gnu/libjemalloc_pic.a"
    program = client("loader_early", GLIBC["x86_64"], "-Wl,-u,malloc", "-lm", "-lunwind", links=archive)
    results = []
    for preload in ("", rootfs.LIBRARY):
        binds = [(libvgpu, rootfs.LIBRARY), (program.parent, "/test")]
        argv = ["/test/loader_early"]
        words = rootfs.command("bookworm", argv, preload=preload, binds=binds, scratch=tmp_path)
        began = time.monotonic()
        done = rootfs.run(words, timeout=20)
        assert time.monotonic() - began < 2
        results.append((done.returncode, done.stdout, done.stderr))
    assert results[0][0] == 0
    assert results[1] == results[0]


@pytest.mark.parametrize("name", [*rootfs.NATIVE, "bookworm-arm64"])
def test_lookups_before_any_constructor_are_served(name: str, libvgpu: Path, tmp_path: Path) -> None:
    """dlsym called from a program's pre-initialiser and by racing threads answers as without us (B026)."""
    rootfs.get(name)
    program = client("loader_early", GLIBC[rootfs.MACHINES[rootfs.SUITES[name].arch]])
    results = []
    for preload in ("", rootfs.LIBRARY):
        binds = [(_library(name, libvgpu), rootfs.LIBRARY), (program.parent, "/test")]
        words = rootfs.command(name, ["/test/loader_early"], preload=preload, binds=binds, scratch=tmp_path)
        done = rootfs.run(words, timeout=20)
        results.append((done.returncode, done.stdout, done.stderr))
    assert results[1] == results[0]
    assert results[0][1].endswith(" 0 different, same twice 1\n")
    assert "nnnnnn" in results[0][1]
