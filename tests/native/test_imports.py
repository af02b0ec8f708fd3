"""Memory shared between processes and interfaces: charged once, for as long as it is held."""

from __future__ import annotations

from conftest import RunClient, SimEnv

CONTEXT = 106954752

USE = """
from simclient import *
from vmmcalls import *
import subprocess, sys
ctx = init(0)
base = same()
"""

# Runs in a second process of the container: one command a line, one answer a line.
PEER = """
import sys
from simclient import *
from vmmcalls import *
init(0)
print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""

WITH_PEER = (
    USE
    + f"""
class Peer:
    def __init__(self, fds=()):
        self.p = subprocess.Popen([sys.executable, "-c", {PEER!r}], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True, pass_fds=fds)
        assert self.p.stdout.readline() == "ready\\n"
    def __call__(self, code):
        self.p.stdin.write(code + "\\n")
        self.p.stdin.flush()
        return eval(self.p.stdout.readline())
    def end(self):
        self.p.stdin.close()
        assert self.p.wait() == 0
"""
)


def _run(run_client: RunClient, env: dict[str, str], code: str, start: str = USE) -> None:
    done = run_client(start + code, env)
    assert done.stderr == ""


def test_an_imported_handle_is_charged_to_its_exporter_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """A peer that imports 600 MiB twice and maps it adds nothing, nor gives anything back (B057)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
h = ok(create(600 * MIB, share=True))
fd = ok(export_fd(h))
peer = Peer((fd,))
full = base + 600 * MIB + CONTEXT
assert used() == full
r, first = peer(f"import_fd({fd})")
r2, second = peer(f"import_fd({fd})")
assert (r, r2) == (0, 0)
r, va = peer("reserve(600 << 20)")
assert peer(f"map_at({va}, 600 << 20, {first})") == 0
assert used() == peer("used()") == full
assert peer(f"release_handle({first})") == 0
assert peer(f"release_handle({second})") == 0
assert used() == full
assert peer(f"unmap({va}, 600 << 20)") == 0
assert used() == peer("used()") == full
assert peer("create(400 << 20)")[0] == OOM
ok(release_handle(h))
assert used() == base + CONTEXT
peer.end()
""".replace("CONTEXT", str(CONTEXT)),
        WITH_PEER,
    )


def test_an_imported_pointer_is_charged_to_its_exporter_once(sim_env: SimEnv, run_client: RunClient) -> None:
    """Opening a peer's memory twice and closing it twice moves no charge; the exporter's free does (B057)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
class Ipc(C.Structure):
    _fields_ = [("bytes", C.c_ubyte * 64)]
p = ok(alloc(600 * MIB))
handle = Ipc()
ok(call("cuIpcGetMemHandle", C.byref(handle), p))
peer = Peer()
full = base + 600 * MIB + CONTEXT
text = bytes(handle.bytes)
opening = ("(lambda t: (lambda h, v: (cu.cuIpcOpenMemHandle_v2(C.byref(v), h, u32(1)), v.value))"
           f"(t.from_buffer_copy({text!r}), u64()))(type('Ipc', (C.Structure,), "
           "{'_fields_': [('b', C.c_ubyte * 64)]}))")
for _ in range(2):
    r, address = peer(opening)
    assert r == 0, r
assert used() == full
for _ in range(2):
    assert peer(f"call('cuIpcCloseMemHandle', {address})") == 0
    assert used() == full
ok(free(p))
assert used() == base + CONTEXT
peer.end()
""".replace("CONTEXT", str(CONTEXT)),
        WITH_PEER,
    )


def test_importing_ones_own_memory_counts_a_reference(sim_env: SimEnv, run_client: RunClient) -> None:
    """An own export imported again is charged once and stays charged until both are released (B057)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
h = ok(create(600 * MIB, share=True))
fd = ok(export_fd(h))
again = ok(import_fd(fd))
assert same() == base + 600 * MIB
os.close(fd)
ok(release_handle(h))
assert same() == base + 600 * MIB
expect(OOM, create(600 * MIB))
ok(release_handle(again))
assert same() == base
""",
    )


def test_memory_kept_only_by_a_descriptor_is_charged_when_it_comes_back(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """Exporting, releasing and importing again is no way around the quota."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
h = ok(create(600 * MIB, share=True))
fd = ok(export_fd(h))
ok(release_handle(h))
other = ok(create(600 * MIB))
expect(OOM, import_fd(fd))
ok(release_handle(other))
again = ok(import_fd(fd))
assert used() == base + 600 * MIB
ok(release_handle(again))
os.close(fd)
assert used() == base
""",
    )


def test_external_memory_is_charged_while_it_is_imported(sim_env: SimEnv, run_client: RunClient) -> None:
    """Memory of another interface counts in full, is refused past the limit and given back on destroy."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g"),
        """
h = ok(create(64 * MIB, share=True))
fd = ok(export_fd(h))
before = used()
external = ok(import_external(os.dup(fd), 64 * MIB))
assert used() == before + 64 * MIB
filler = ok(create(700 * MIB))
expect(OOM, import_external(os.dup(fd), 200 * MIB))
ok(release_handle(filler))
ok(destroy_external(external))
assert used() == before
assert destroy_external(0) != 0
expect(INVALID_VALUE, call("cuImportExternalMemory", C.byref(ptr()), ptr(None)))
ok(release_handle(h))
assert used() == base
""",
    )


def test_failing_imports_change_no_charge(sim_env: SimEnv, run_client: RunClient) -> None:
    """Faults of import, export and destroy leave quota and references as they were (B046)."""
    faults = "cuMemExportToShareableHandle:1:999,cuMemImportFromShareableHandle:1:999"
    faults += ",cuImportExternalMemory:1:999,cuDestroyExternalMemory:1:999"
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS=faults),
        """
h = ok(create(64 * MIB, share=True))
expect(999, export_fd(h))
fd = ok(export_fd(h))
expect(999, import_fd(fd))
again = ok(import_fd(fd))
ok(release_handle(h))
assert same() == base + 64 * MIB
expect(999, import_external(os.dup(fd), 64 * MIB))
assert used() == base + 64 * MIB
external = ok(import_external(os.dup(fd), 64 * MIB))
assert used() == base + 128 * MIB
expect(999, destroy_external(external))
assert used() == base + 128 * MIB
ok(destroy_external(external))
ok(release_handle(again))
os.close(fd)
assert used() == base
""",
    )


def test_an_import_whose_properties_cannot_be_read_still_works(
    sim_env: SimEnv, run_client: RunClient
) -> None:
    """The query after an import may fail: the caller has its handle, and nothing is charged (B046)."""
    _run(
        run_client,
        sim_env(preload=True, limit="1g", SIMGPU_FAULTS="cuMemGetAllocationPropertiesFromHandle:*:999"),
        """
peer = Peer()
h = ok(create(64 * MIB, share=True))
fd = ok(export_fd(h))
again = ok(import_fd(fd))
ok(release_handle(again))
ok(release_handle(h))
os.close(fd)
assert used() == base + CONTEXT
peer.end()
""".replace("CONTEXT", str(CONTEXT)),
        WITH_PEER,
    )
