"""Root file systems of other Debian releases, and programs run in them with the library preloaded.

A root is unpacked from the packages of its release (nothing is configured, nothing of the release runs), kept
under `$XDG_CACHE_HOME/kai-resource-isolator/rootfs/` and never written to again: each run binds what it needs
over placeholders, in a mount namespace of its own.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
QEMU = "qemu-aarch64-static"
COMMON = "base-files bash coreutils dash libstdc++6 python3-minimal"
ALLOCATORS = "libjemalloc2 libtcmalloc-minimal4"
PASSWD = "root:x:0:0::/:/bin/sh\nuser:x:1024:1024::/:/bin/sh\n"
# What runs put in place: a bind mount needs something to cover.
FOLDERS = ("proc", "dev", "sim", "test", "tmp", "usr/local/vgpu", "opt/odd-dir", "etc")
FILES = ("etc/ld.so.preload", "usr/local/vgpu/libvgpu.so", "opt/odd-dir/libvgpu.so", "qemu")
LIBRARY = "/usr/local/vgpu/libvgpu.so"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Suite:
    """A release for one architecture, with the packages a root of it holds."""

    release: str
    glibc: str
    packages: str
    arch: str = "amd64"
    foreign: str = ""

    @property
    def recipe(self) -> str:
        """Changes when a kept root no longer is what would be built now."""
        return hashlib.sha256(f"{self}{FOLDERS}{FILES}{PASSWD}".encode()).hexdigest()[:16]


SUITES = {
    "bullseye": Suite("bullseye", "2.31", f"{COMMON} {ALLOCATORS}"),
    "bookworm": Suite(
        "bookworm",
        "2.36",
        f"{COMMON} {ALLOCATORS} busybox-static musl-dev libjemalloc-dev libc6:i386",
        foreign="i386",
    ),
    "trixie": Suite("trixie", "2.41", f"{COMMON} {ALLOCATORS}"),
    "bookworm-arm64": Suite("bookworm", "2.36", COMMON, arch="arm64"),
}
NATIVE = [name for name, suite in SUITES.items() if suite.arch == "amd64"]

_SCRIPT = """
set -e
root=$1; shift
while [ "$1" != -- ]; do mount --bind "$1" "$root$2"; shift 2; done
shift
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs none "$root/dev/shm"
for place in $READ_ONLY; do mount -o remount,bind,ro "$root$place"; done
exec chroot --userspec="$1" "$root" "${@:2}"
"""

# /etc of this machine gets a preload file without being touched: a tmpfs of links covers it.
_HOST_SCRIPT = """
set -e
mkdir "$1/etc"
mount --bind /etc "$1/etc"
mount -t tmpfs none /etc
ln -s "$1"/etc/* /etc/
printf '%s\\n' "$2" >/etc/ld.so.preload
exec "${@:3}"
"""


class Unavailable(Exception):
    """A root cannot be made here; the message is the reason to skip."""


def _mirror() -> str:
    """The Debian mirror this machine's apt uses already."""
    named = os.environ.get("ISOLATOR_TEST_MIRROR")
    if named:
        return named
    query = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)", "Created-By: Packages"]
    listed = subprocess.run(query, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        uri, _, label = line.partition(" ")
        if label == "Debian":
            return uri
    raise Unavailable("apt knows no Debian mirror (ISOLATOR_TEST_MIRROR names one)")


def _apt(work: Path, suite: Suite) -> list[str]:
    """apt-get on a state of its own: nothing installed, one release, no translations."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    (work / "status").touch()
    source = f"deb [signed-by={KEYRING}] {_mirror()} {suite.release} main\n"
    (work / "sources.list").write_text(source)
    options = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": work,
        "Dir::State::status": work / "status",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Architecture": suite.arch,
        "APT::Architectures": f"{suite.arch},{suite.foreign}".rstrip(","),
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
    }
    return ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{command[0]}: {said[-3:] if said else done.returncode}")


def _complete(root: Path) -> None:
    """What configuring the packages would have made, and the placeholders."""
    if not (root / "bin/sh").is_symlink():
        (root / "bin/sh").symlink_to("dash")
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (root / name).touch()
    (root / "etc/passwd").write_text(PASSWD)
    (root / "tmp").chmod(0o1777)


def _build(suite: Suite, root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rootfs-") as scratch:
        work = Path(scratch)
        apt = _apt(work, suite)
        _run([*apt, "update"])
        _run([*apt, "install", "-y", "-d", *suite.packages.split()])
        debs = sorted((work / "cache/archives").glob("*.deb"))
        # First the package that owns /bin and /lib: links in newer releases.
        for deb in sorted(debs, key=lambda deb: not deb.name.startswith("base-files_")):
            _run(["dpkg-deb", "-x", deb, root])
    _complete(root)


@contextmanager
def locked(path: Path) -> Iterable[None]:  # type: ignore[misc]
    """One maker at a time, also between test workers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def _made(name: str) -> Path | str:
    """The root's folder, or why there is none."""
    suite = SUITES[name]
    if os.geteuid() != 0:
        return "needs root, for mount namespaces"
    if platform.machine() != "x86_64":
        return "the roots are for x86_64 machines"
    needed = ["apt-get", "dpkg-deb", "unshare", "chroot", *([QEMU] if suite.arch == "arm64" else [])]
    missing = [tool for tool in needed if not shutil.which(tool)]
    if missing or not KEYRING.exists():
        return f"needs {', '.join(missing) or KEYRING}"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return "mount namespaces are not allowed here"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kai-resource-isolator/rootfs"
    root, stamp = cache / name, cache / f"{name}.recipe"
    with locked(cache / f"{name}.lock"):
        if root.is_dir() and stamp.exists() and stamp.read_text() == suite.recipe:
            return root
        fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        fresh.chmod(0o755)
        try:
            _build(suite, fresh)
        except Unavailable as error:
            shutil.rmtree(fresh)
            return f"no {name} root: {error}"
        stamp.unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        fresh.rename(root)
        stamp.write_text(suite.recipe)
    return root


def get(name: str) -> Path:
    """The root file system `name`, made on first use; skips the test where it cannot be."""
    made = _made(name)
    if isinstance(made, str):
        pytest.skip(made)
    return made


def command(
    name: str,
    argv: Sequence[str],
    *,
    preload: str = "",
    binds: Iterable[tuple[Path, str]] = (),
    env: Mapping[str, str] | None = None,
    user: str = "0:0",
    read_only: str = "",
    scratch: Path,
) -> list[str]:
    """What runs `argv` in the root, with `preload` as the text of /etc/ld.so.preload.

    `binds` are (file or folder here, place in the root); the place must be one of FOLDERS or FILES.
    `read_only` names those of the places that are to be read-only.
    """
    root = get(name)
    text = scratch / f"preload-{hashlib.sha256(preload.encode()).hexdigest()[:8]}"
    text.write_text(preload)
    variables = [f"{key}={value}" for key, value in {"PATH": "/usr/bin:/bin", **(env or {})}.items()]
    if SUITES[name].arch == "arm64":
        qemu = Path(shutil.which(QEMU) or "")
        binds = [*binds, (qemu, "/qemu")]
        inside = ["/qemu", *(word for pair in variables for word in ("-E", pair)), *argv]
    else:
        inside = ["/usr/bin/env", "-i", *variables, *argv]
    mounts = [str(word) for bind in [(text, "/etc/ld.so.preload"), *binds] for word in bind]
    script = f"READ_ONLY='{read_only}'\n{_SCRIPT}"
    return ["unshare", "-m", "bash", "-c", script, "jail", str(root), *mounts, "--", user, *inside]


def host_command(argv: Sequence[str], preload: str, scratch: Path) -> list[str]:
    """What runs `argv` in this machine's own file system with `preload` in its /etc/ld.so.preload."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for mount namespaces")
    folder = Path(tempfile.mkdtemp(dir=scratch))
    return ["unshare", "-m", "bash", "-c", _HOST_SCRIPT, "jail", str(folder), preload, *argv]


def run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """The finished process; output as text, standard input is empty, the environment has PATH."""
    given: dict[str, object] = {
        "timeout": 60,
        "stdin": subprocess.DEVNULL,
        "env": {"PATH": os.environ["PATH"]},
    }
    given.update(options)
    return subprocess.run(command, capture_output=True, text=True, **given)  # type: ignore[call-overload]


def glibc_of(name: str) -> str:
    """The version the root's own libc states."""
    found = next(get(name).glob("**/libc.so.6")).read_bytes()
    stated = re.search(rb"GNU C Library .* version (\d+\.\d+)", found)
    assert stated
    return stated.group(1).decode()
