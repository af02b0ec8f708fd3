"""Image archives made here: `pause` and `busybox`, and the writer that others can use for theirs.

An archive has the form of `docker save`, which containerd's import reads. Both images are static programs:
nothing is fetched.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PAUSE = "images.example.com/local/pause:1"
BUSYBOX = "images.example.com/local/busybox:1"
PASSWD = "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home:/bin/sh\n"
BUSYBOX_PROGRAM = Path("/bin/busybox")

_PAUSE_SOURCE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void quit(int sign) { _exit(0); }
static void reap(int sign) { while (waitpid(-1, 0, WNOHANG) > 0) {} }

int main(void) {
    signal(SIGTERM, quit);
    signal(SIGINT, quit);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


def _member(name: str, mode: int, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name.strip("/"))
    member.mode, member.size = mode, size
    return member


def _layer(files: Mapping[str, bytes | Path], links: Mapping[str, str]) -> bytes:
    """A tar of `files` (place -> content; a Path keeps its executable bits) and symbolic `links`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder, mode in (
            ("tmp", 0o1777),
            ("etc", 0o755),
            ("bin", 0o755),
            ("root", 0o700),
            ("home", 0o755),
        ):
            member = _member(folder, mode)
            member.type = tarfile.DIRTYPE
            tar.addfile(member)
        for place, content in sorted(files.items()):
            mode = content.stat().st_mode & 0o755 if isinstance(content, Path) else 0o644
            data = content.read_bytes() if isinstance(content, Path) else content
            tar.addfile(_member(place, mode, len(data)), io.BytesIO(data))
        for place, target in sorted(links.items()):
            member = _member(place, 0o777)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return buffer.getvalue()


def write_image(
    archive: Path,
    name: str,
    files: Mapping[str, bytes | Path],
    *,
    links: Mapping[str, str] | None = None,
    entrypoint: Sequence[str] = (),
    command: Sequence[str] = (),
    env: Sequence[str] = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",),
) -> Path:
    """Writes an image of one layer under a full name such as `images.example.com/local/busybox:1`."""
    layer = _layer(files, links or {})
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint) or None, "Cmd": list(command) or None, "Env": list(env)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created_by": "tests"}],
    }
    raw = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(raw).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {config_name: raw, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(archive, "w") as tar:
        for part, data in parts.items():
            tar.addfile(_member(part, 0o644, len(data)), io.BytesIO(data))
    return archive


def pause(folder: Path) -> Path:
    """The sandbox image: one static program that sleeps and reaps."""
    program = folder / "pause"
    subprocess.run(
        ["gcc", "-static", "-Os", "-w", "-x", "c", "-", "-o", program],
        input=_PAUSE_SOURCE.encode(),
        check=True,
    )
    return write_image(folder / "pause.tar", PAUSE, {"pause": program}, entrypoint=["/pause"])


def busybox(folder: Path) -> Path:
    """A shell with the usual tools, from Debian's static busybox."""
    program = Path(shutil.copy(BUSYBOX_PROGRAM, folder / "busybox"))
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    links = {f"bin/{applet}": "/bin/busybox" for applet in applets if applet != "busybox"}
    files: dict[str, bytes | Path] = {"bin/busybox": program, "etc/passwd": PASSWD.encode()}
    return write_image(folder / "busybox.tar", BUSYBOX, files, links=links, command=["/bin/sh"])
