"""Tenants that are root in their container, or a stranger there, and what they leave in their own cache."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from harness import Cluster, wait_for
from isolator._core import ffi
from kai import Kai
from product import PASS, Product, cache_folder, metrics, tenant, value, wait_running

from isolator import names

MOUNT = names.DEFAULT_VGPU_MOUNT
CONTAINERS = f"{MOUNT}/{names.CONTAINERS_DIRECTORY}"
LIBRARY = f"{MOUNT}/{names.LIBRARY_FILE}"
LIMIT = f"{MOUNT}/{names.LIMIT_FILE}"
ROOM = f"root-{uuid.uuid4().hex[:8]}"
LIMIT_BYTES = 4147 << 20
# Each line is one attempt on a file; what comes back is `done` or why it was refused.
ATTEMPTS = f"""
import ctypes, json, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def called(name, *words):
    if getattr(libc, name)(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def text(path): return ctypes.c_char_p(path.encode() if path else None)
READ_ONLY, REMOUNT, BIND, MOVE = 1, 32, 4096, 8192
each = {{
    "write": lambda p: open(p, "r+b").write(b"x"),
    "truncate": lambda p: os.truncate(p, 0),
    "append": lambda p: open(p, "ab").write(b"x"),
    "chmod": lambda p: os.chmod(p, 0o777),
    "chown": lambda p: os.chown(p, 1000, 1000),
    "times": lambda p: os.utime(p, (0, 0)),
    "unlink": lambda p: os.unlink(p),
    "rename": lambda p: os.rename(p, p + ".old"),
    "replace": lambda p: os.rename("/tmp/mine", p),
    "link": lambda p: os.link(p, "{CONTAINERS}/link"),
    "remount": lambda p: called("mount", text(None), text(p), text(None), REMOUNT | BIND, None),
    "cover": lambda p: called("mount", text("/tmp/mine"), text(p), text(None), BIND, None),
    "uncover": lambda p: called("umount2", text(p), 2),
    "through-proc": lambda p: open("/proc/self/root" + p, "r+b").write(b"x"),
}}
open("/tmp/mine", "w").write("mine")
told = {{}}
for path in sys.argv[1:]:
    for name, attempt in each.items():
        try:
            attempt(path)
            told[name + " " + path] = "done"
        except OSError as error:
            told[name + " " + path] = error.strerror
print(json.dumps(told))
"""
ESCAPES = f"""
import json, os, stat
os.chdir("{CONTAINERS}")
told = {{}}
def attempt(name, call):
    try:
        told[name] = call() or "done"
    except OSError as error:
        told[name] = error.strerror
def device():
    os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    try:
        open("disk", "rb").read(1)
    finally:
        os.unlink("disk")
def through():
    os.symlink("{MOUNT}/../../..", "up")
    try:
        return sorted(os.listdir("up/{CONTAINERS}"))
    finally:
        os.unlink("up")
attempt("device", device)
attempt("through", through)
attempt("above", lambda: sorted(os.listdir("..")))
attempt("mount", lambda: sorted(os.listdir("{MOUNT}")))
attempt("rename-own", lambda: os.rename("{CONTAINERS}", "{MOUNT}/x"))
attempt("remove-own", lambda: os.rmdir("{CONTAINERS}"))
print(json.dumps(told))
"""


def secured(**security: Any) -> dict[str, Any]:
    return {"securityContext": security}


@dataclass
class Room:
    """Pods by name, ready, on node n1 and its one card."""

    cluster: Cluster
    pods: dict[str, dict[str, Any]]

    def run(self, name: str, *command: str) -> str:
        return self.cluster.exec_(name, command, namespace=ROOM)

    def passes(self, name: str) -> None:
        """Its next program is held to 4147 MiB."""
        said = self.run(name, "sh", "-c", "memory-limit 2>&1")
        assert PASS in said, said

    def value(self, metric: str, name: str) -> float | None:
        labels = {"namespace": ROOM, "pod": name, "container": "main"}
        return value(metrics(self.cluster, "n1"), metric, **labels)

    def wait_value(self, metric: str, name: str, wanted: float | None) -> None:
        wait_for(lambda: self.value(metric, name) == wanted, 60, f"{metric} of {name} to be {wanted}", 0.3)


def pods() -> list[dict[str, Any]]:
    on = {"nodeSelector": {"kubernetes.io/hostname": "n1"}}
    strict = {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "allowPrivilegeEscalation": False}
    none = {"capabilities": {"drop": ["ALL"]}}
    bare = secured(runAsUser=1000, **none, **strict)
    openshift = {"runAsUser": 1000650000, "fsGroup": 1000650000, "runAsNonRoot": True}
    return [
        tenant("root", container=secured(runAsUser=0), **on),
        tenant("bare", container=bare, **on),
        tenant("openshift", container=secured(**none), securityContext=openshift, **on),
    ]


@pytest.fixture(scope="module")
def room(cluster: Cluster, product: Product, kai: Kai) -> Iterator[Room]:
    with cluster.space(ROOM):
        made = pods()
        cluster.apply(made, ROOM)
        wanted = [pod["metadata"]["name"] for pod in made]
        found = wait_running(cluster, *wanted, namespace=ROOM, kai=kai, timeout=240)
        yield Room(cluster, dict(zip(wanted, found, strict=True)))


def digest(path: Any) -> tuple[str, int, int]:
    """Content, mode and owner of a file."""
    found = path.stat()
    return hashlib.sha256(path.read_bytes()).hexdigest(), found.st_mode, found.st_uid


def test_users_of_every_kind_are_held_to_the_limit(room: Room) -> None:
    """Uid 1000 without a capability on a read-only root, an OpenShift uid with fsGroup, root (B116 B143)."""
    for name in room.pods:
        room.passes(name)
        room.wait_value("hami_vgpu_memory_limit_bytes", name, LIMIT_BYTES)
        room.wait_value("kai_isolator_region_tampered", name, 0)
    assert room.run("bare", "id", "-u").strip() == "1000"
    assert room.run("openshift", "id", "-u").strip() == "1000650000"


def test_two_users_of_one_container_share_one_ledger(room: Room) -> None:
    """What root's process holds is missing to uid 1024's and the other way round (B141)."""
    for first, second in ((0, 1024), (1024, 0)):
        run = "setpriv --reuid {} --clear-groups"
        script = f"""HOLD_SECONDS=60 {run.format(first)} memory-limit 3072 >/tmp/held-{first} 2>&1 & held=$!
        until grep -q 'GiB:' /tmp/held-{first}; do sleep 0.1; done; cat /tmp/held-{first}
        {run.format(second)} memory-limit 2048 2>&1; kill $held"""
        said = room.run("root", "sh", "-c", script)
        assert "allocate 3 GiB: no error" in said and "allocate 2 GiB: out of memory" in said, said


def test_root_changes_neither_library_nor_preload_file_nor_limit(room: Room) -> None:
    """Every way to write, replace, cover or unmount the three files is refused; they stay as they were."""
    node = room.cluster.node(1)
    on_node = [node.path(LIBRARY), node.path(f"{MOUNT}/{names.PRELOAD_KEY}")]
    before = [digest(path) for path in on_node]
    told = json.loads(room.run("root", "python3", "-c", ATTEMPTS, LIBRARY, names.PRELOAD_FILE, LIMIT))
    assert len(told) == 3 * 14
    assert not {what for what, answer in told.items() if answer == "done"}
    assert [digest(path) for path in on_node] == before
    room.passes("root")


def test_root_reaches_no_other_tenant_and_no_device_of_the_node(room: Room) -> None:
    """From its cache folder it sees its own three names; a device node that it makes cannot be opened."""
    told = json.loads(room.run("root", "python3", "-c", ESCAPES))
    assert told["device"] in ("Operation not permitted", "Permission denied")
    assert set(told["through"]) == {names.CACHE_FILE, "up"}
    own = {names.CONTAINERS_DIRECTORY, names.LIBRARY_FILE, names.LIMIT_DIRECTORY}
    assert set(told["above"]) == set(told["mount"]) == own
    assert told["rename-own"] == told["remove-own"] == "Device or resource busy"
    room.passes("openshift")


SCRIBBLES = {
    "random": ("open(p, 'r+b').write(os.urandom(os.path.getsize(p)))", "not_region"),
    "truncated": ("os.truncate(p, 4096)", "truncated"),
    "empty": ("os.truncate(p, 0)", "empty"),
    "sparse": ("os.truncate(p, 1 << 40)", "too_big"),
    "link": ("os.unlink(p); os.symlink('/etc/passwd', p)", "link"),
    "link-up": ("os.unlink(p); os.symlink('../../libsync.json', p)", "link"),
    "pipe": ("os.unlink(p); os.mkfifo(p)", "not_regular"),
    "folder": ("os.unlink(p); os.mkdir(p)", "not_regular"),
}


@pytest.mark.parametrize("how", SCRIBBLES)
def test_a_scribbled_cache_is_reported_and_lifts_nothing(room: Room, how: str) -> None:
    """The monitor counts it by reason, goes on with the others; a new program is held or refused (B149)."""
    change, reason = SCRIBBLES[how]
    room.wait_value("hami_vgpu_memory_limit_bytes", "root", LIMIT_BYTES)
    before = value(metrics(room.cluster, "n1"), "kai_isolator_skipped_files", reason=reason)
    room.run("root", "python3", "-c", f"import os; p = '{CONTAINERS}/{names.CACHE_FILE}'; {change}")
    assert before is not None

    def reported() -> bool:
        samples = metrics(room.cluster, "n1")
        state = {"namespace": ROOM, "pod": "root", "container": "main", "state": "unreadable"}
        more = value(samples, "kai_isolator_skipped_files", reason=reason)
        return more == before + 1 and value(samples, "kai_isolator_container_state", **state) == 1

    try:
        wait_for(reported, 60, f"{reason} to be reported", every=0.3)
        assert room.value("hami_vgpu_memory_limit_bytes", "bare") == LIMIT_BYTES
        said = room.run("root", "sh", "-c", "memory-limit 2>&1 || true")
        assert "another 2 GiB: no error" not in said
        assert PASS in said or "operation not permitted" in said, said
    finally:
        room.run("root", "sh", "-c", f"rm -rf {CONTAINERS}/*")
    room.passes("root")


SCRIBBLE = """
import struct, sys
with open(sys.argv[1], "r+b") as file:
    file.seek(int(sys.argv[2]))
    file.write(struct.pack("<Q", int(sys.argv[3])))
"""
# Asks for 64 MiB again and again, as programs do; stops at the first answer that is none of the two.
BUSY = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
context, where = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(1 << 30)) == 0
print("GiB: held", flush=True)
while True:
    if cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(64 << 20)) == 0:
        assert cuda.cuMemFree_v2(where) == 0
    time.sleep(0.1)
"""
HELD = "echo $! >/tmp/holder; timeout 60 sh -c \"until grep -q 'GiB:' /tmp/held; do sleep 0.1; done\""


def test_a_raised_limit_in_the_region_is_ignored_and_reported_as_tampered(room: Room) -> None:
    """1 TiB written into the region under a busy process: that one and the next stay at 4147 MiB (B149)."""
    at = ffi.offsetof("struct vgpu_hami_region", "limit")
    file = f"{CONTAINERS}/{names.CACHE_FILE}"
    script = f"""python3 -c "$BUSY" >/tmp/held 2>&1 & {HELD}
    python3 -c "$SCRIBBLE" {file} {at} {1 << 40}; memory-limit 3072 2>&1; memory-limit 2048 2>&1"""
    said = room.run("root", "env", f"BUSY={BUSY}", f"SCRIBBLE={SCRIBBLE}", "sh", "-c", script)
    assert "allocate 3 GiB: out of memory" in said and "allocate 2 GiB: no error" in said, said
    room.wait_value("kai_isolator_region_tampered", "root", 1)
    events = lambda: [each["reason"] for each in room.cluster.events("root", namespace=ROOM)]  # noqa: E731
    wait_for(lambda: "GPUMemoryTampered" in events(), 60, "the event", every=0.5)
    room.run("root", "sh", "-c", f"kill $(cat /tmp/holder) && rm -f {CONTAINERS}/*")
    room.passes("root")
    room.wait_value("kai_isolator_region_tampered", "root", 0)


def test_a_filled_cache_folder_is_emptied_but_for_the_region(room: Room) -> None:
    """200 MiB in a thousand files go within a few passes down to 16 MiB, the region in use stays (B147)."""
    script = f"""cd {CONTAINERS}; HOLD_SECONDS=600 memory-limit 1024 >/tmp/held 2>&1 & {HELD}
    cd {CONTAINERS}; mkdir -p a/b/c; for i in $(seq 1000); do echo x >a/b/c/$i; done; ln -s /etc a/link
    dd if=/dev/zero of=big bs=1M count=100 status=none; cp big other.cache; stat -c %i {names.CACHE_FILE}"""
    inode = room.run("root", "sh", "-c", script).split()[-1]
    folder = cache_folder(room.cluster, room.pods["root"])

    def small() -> bool:
        try:
            found = [path.lstat() for path in folder.rglob("*")]
        except FileNotFoundError:  # it is just being cleaned
            return False
        return len(found) <= 1000 and sum(each.st_blocks * 512 for each in found) <= 16 << 20

    wait_for(small, 120, "the folder's clean-up", 0.5)
    assert not (folder / "big").exists() and not (folder / "other.cache").exists()
    assert str((folder / names.CACHE_FILE).stat().st_ino) == inode
    assert room.value("hami_vgpu_memory_used_bytes", "root") == (1 << 30) + 106_954_752
    room.run("root", "sh", "-c", "memory-limit 2048; kill $(cat /tmp/holder)")
    room.passes("root")
