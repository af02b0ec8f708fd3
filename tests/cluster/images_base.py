"""How the tests build images: buildah on a store of ours, bases unpacked from Debian's packages, kept wheels.

No daemon runs and no registry of images is asked. What was made is kept below CACHE.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native"))

import rootfs

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kai-resource-isolator" / "images"
LAYER_LIMIT = 16 << 30
"""Bytes of kept layers after which all are made anew."""
KEEP = 3
"""Archives of one image that are kept."""
RUN_PACKAGES = "base-files bash coreutils dash findutils grep sed procps util-linux libc-bin python3"
BUILD_PACKAGES = f"{RUN_PACKAGES} python3-venv python3-dev"
UNUSED = ("perl", "libperl", "systemd", "util-linux-extra", "e2fsprogs", "login_", "mount_")
"""Packages that only configure others, or a machine."""
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home:/bin/sh\n"
FOLDERS = {
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "tmp": 0o1777,
    "home": 0o755,
    "root": 0o700,
    "etc": 0o755,
}
RUN_BASE = "localhost/isolator-test/debian-python"
BUILD_BASE = "localhost/isolator-test/debian-python-build"

Unavailable = rootfs.Unavailable
"""An image cannot be made here; the message is the reason to skip."""


class BuildError(Exception):
    """A Dockerfile, or what it builds, is wrong; the message has the builder's last lines."""


def why_not() -> str:
    """Empty where images can be built, else what is missing."""
    if os.geteuid() != 0:
        return "needs root, to build images"
    missing = [tool for tool in ("buildah", "apt-get", "dpkg-deb") if not shutil.which(tool)]
    return f"needs {', '.join(missing)} (apt-get install buildah)" if missing else ""


def run(command: Sequence[str | Path], error: type[Exception] = Unavailable, **options: object) -> str:
    """Standard output of a finished command; a failing one raises `error` with its last lines."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise error(f"{' '.join(map(str, command[:8]))}: " + "\n".join(said[-15:]))
    return str(done.stdout)


def _buildah(*words: str | Path) -> str:
    """buildah on a store of ours: no daemon, nothing of the machine's own store is seen or changed."""
    store = CACHE / "store"
    # Overlays do not stack: where the cache lies on one, as in many CI containers, layers are copied.
    driver = "vfs" if run(["stat", "-f", "-c", "%T", CACHE]).strip() == "overlayfs" else "overlay"
    places = ["--root", store / "root", "--runroot", store / "run", "--storage-driver", driver]
    env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    return run(["buildah", *places, *words], BuildError, env=env, timeout=1200)


def _digest(*parts: str | bytes) -> str:
    known = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        known.update(len(raw).to_bytes(8, "big") + raw)
    return known.hexdigest()[:16]


# ---- bases ---------------------------------------------------------------------------------------------


def _unpack(packages: str, root: Path) -> None:
    """A root of bookworm with `packages` unpacked, none configured."""
    with tempfile.TemporaryDirectory(prefix="image-debs-") as scratch:
        work = Path(scratch)
        apt = rootfs._apt(work, rootfs.Suite("bookworm", "2.36", packages))
        run([*apt, "update"])
        run([*apt, "install", "-y", "-d", *packages.split()])
        debs = sorted((work / "cache/archives").glob("*.deb"))
        debs = [deb for deb in debs if not deb.name.startswith(UNUSED)]
        for deb in sorted(debs, key=lambda deb: not deb.name.startswith("base-files_")):
            run(["dpkg-deb", "-x", deb, root])
    for unread in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache"):
        shutil.rmtree(root / unread, ignore_errors=True)
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to("dash")
    for name, mode in FOLDERS.items():
        (root / name).mkdir(exist_ok=True)
        (root / name).chmod(mode)
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/passwd").write_text(PASSWD)


def _base(name: str, packages: str) -> str:
    """The local name of a base image, made when the recipe is new."""
    image = f"{name}:{_digest(packages, PASSWD, repr(FOLDERS), repr(UNUSED))}"
    if _buildah("images", "-q", "--filter", f"reference={image}").strip():
        return image
    with tempfile.TemporaryDirectory(prefix="image-base-", dir=CACHE) as scratch:
        root, context = Path(scratch) / "root", Path(scratch) / "context"
        root.mkdir(mode=0o755)
        context.mkdir()
        _unpack(packages, root)
        with tarfile.open(context / "root.tar", "w") as tar:
            tar.add(root, ".", filter=_plain)
        (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        _buildah("build", "--layers=false", "-t", image, context)
    return image


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    return member


def wheels() -> Path:
    """A folder with every wheel the image needs, fetched once for the Python of the bases."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = [r for r in project["build-system"]["requires"] if not r.startswith("nvidia-")]
    wanted = sorted([*build, "wheel", *project["project"]["dependencies"]])
    folder = CACHE / f"wheels-{_digest(*wanted)}"
    if folder.is_dir():
        return folder
    machine = os.uname().machine
    platforms = [f"manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_26", "_2_28", "_2_31", "_2_34")]
    fresh = Path(tempfile.mkdtemp(prefix=".wheels-", dir=CACHE))
    try:
        run(
            [
                *(sys.executable, "-m", "pip", "download", "-q", "--dest", fresh, "--only-binary=:all:"),
                *("--python-version", "3.11", "--implementation", "cp"),
                *(word for platform in platforms for word in ("--platform", platform)),
                *wanted,
            ]
        )
        fresh.chmod(0o755)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return folder


# ---- images --------------------------------------------------------------------------------------------


def _keep(archive: Path) -> None:
    """Drops all but the archives of an image that were used last."""
    family = archive.name.rpartition("-")[0]
    old = sorted(CACHE.glob(f"{family}-*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in old[KEEP:]:
        path.unlink(missing_ok=True)


def _save(name: str, archive: Path) -> None:
    fresh = archive.with_suffix(f".{os.getpid()}")
    try:
        _buildah("push", "-q", name, f"docker-archive:{fresh}:{name}")
        fresh.replace(archive)
    finally:
        fresh.unlink(missing_ok=True)
    _keep(archive)


def _trim() -> None:
    """Starts the layer store anew when it has grown past LAYER_LIMIT."""
    store = CACHE / "store"
    if not store.is_dir():
        return
    # Files that another build takes away meanwhile make du fail; it tells the sum of the rest.
    told = subprocess.run(["du", "-sb", store], capture_output=True, text=True).stdout.split()
    if told and int(told[0]) > LAYER_LIMIT:
        shutil.rmtree(store)


def build(
    repository: str,
    sources: Mapping[str, Path],
    arguments: Mapping[str, str],
    prepare: Callable[[Path], None],
    keys: Sequence[bytes] = (),
) -> tuple[Path, str]:
    """Archive and name of what the Dockerfile among `sources` (place in the context -> file) makes.

    Built unless the same was built before; `prepare` then adds to the context what depends on nothing but the
    sources and `keys`. Raises Unavailable where images cannot be built here, BuildError where these cannot.
    """
    reason = why_not()
    if reason:
        raise Unavailable(reason)
    parts = [part for place, path in sources.items() for part in (place, path.read_bytes())]
    key = _digest(
        repository, RUN_PACKAGES, BUILD_PACKAGES, PASSWD, repr(arguments), repr(UNUSED), *parts, *keys
    )
    name, archive = f"{repository}:{key}", CACHE / f"{repository.rpartition('/')[2]}-{key}.tar"
    CACHE.mkdir(parents=True, exist_ok=True)
    with rootfs.locked(CACHE / "lock"):
        if archive.exists():
            os.utime(archive)
            return archive, name
        _trim()
        given = {"BASE": _base(RUN_BASE, RUN_PACKAGES), "BUILD_BASE": _base(BUILD_BASE, BUILD_PACKAGES)}
        with tempfile.TemporaryDirectory(prefix="image-context-", dir=CACHE) as scratch:
            context = Path(scratch)
            for place, path in sources.items():
                (context / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, context / place)
            prepare(context)
            words = [f"--build-arg={key}={value}" for key, value in {**given, **arguments}.items()]
            _buildah("build", "--layers", "--network=none", *words, "-t", name, context)
        _save(name, archive)
    return archive, name
