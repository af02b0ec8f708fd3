"""Mappings and memory shared between processes on the simulated card, as measured on an H200."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from conftest import SimEnv
from simgpu_ask import Client, ask

START = """
init(); link = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
link = socket.socket(fileno=int(os.environ["LINK"])) if "LINK" in os.environ else link
send = lambda fd: socket.send_fds(link, [b"x"], [fd]) and 0
take = lambda: socket.recv_fds(link, 1, 1)[1][0]
own = lambda: used() - 518
total = lambda: (sim_device_used() >> 20)
"""


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


@pytest.fixture
def pair(h200: dict[str, str]) -> Iterator[tuple[Client, Client]]:
    """Two clients with a context each and a socket between them."""
    ends = socket.socketpair()
    clients = [Client({**h200, "LINK": str(end.fileno())}, START, pass_fds=[end.fileno()]) for end in ends]
    for end in ends:
        end.close()
    with clients[0], clients[1]:
        yield clients[0], clients[1]


def test_vmm_lives_until_the_last_release_and_unmap(h200: dict[str, str]) -> None:
    """Handles and mappings both hold the memory; reserving and mapping take nothing."""
    code = """
        init(); a, h = grown(mem_create, 64 * MIB); r, p = grown(reserve, 128 * MIB)
        m = [grow(mem_map, p, 64 * MIB, h), grow(mem_map, p + 64 * MIB, 64 * MIB, h)]
        same = ok(mem_retain(p)) == h; rel = [grow(mem_release, h), grow(mem_release, h), mem_release(h)]
        new = ok(mem_create(2 * MIB)); back = ok(mem_retain(p + 64 * MIB)) == h; ok(mem_release(h))
        say(a, r, m, same, rel, new == h, back)
        say(mem_unmap(p, 32 * MIB), mem_unmap(p + 32 * MIB, 64 * MIB), address_free(p, 128 * MIB),
            grow(mem_unmap, p, 64 * MIB), grow(mem_unmap, p + 64 * MIB, 64 * MIB), address_free(p, 128 * MIB))
    """
    assert ask(h200, code) == [[64, 0, [0, 0], True, [0, 0, 1], False, True], [1, 1, 1, 0, -64, 0]]


def test_vmm_checks_its_arguments(h200: dict[str, str]) -> None:
    """Odd sizes, offsets, overlaps, foreign ranges and host locations."""
    code = """
        init(); h = ok(mem_create(4 * MIB)); p = ok(reserve(8 * MIB)); ok(mem_map(p, 4 * MIB, h))
        say(mem_create(3 * MIB)[0], mem_create(2 * MIB, dev=7)[0], mem_map(p, 4 * MIB, h),
            mem_map(p + 4 * MIB, 2 * MIB, h, 2 * MIB), mem_map(p + 6 * MIB, 4 * MIB, h),
            mem_map(p, 2 * MIB, 99),
            grow(mem_create, 64 * MIB, 0, 0, HOST), mem_unmap(p + 4 * MIB, 4 * MIB))
    """
    assert ask(h200, code) == [1, 101, 1, 801, 1, 1, 0, 1]


def test_vmm_works_without_a_context(h200: dict[str, str]) -> None:
    """Memory of no context is on the card, but NVML lists no process for it yet."""
    code = """
        ok(cu_init()); ok(mem_create(64 * MIB)); early = (me in nvml_processes(), sim_device_used() >> 20)
        init(); say(early, nvml_processes()[me] >> 20)
    """
    assert ask(h200, code) == [[False, 64], 518 + 64]


def test_ipc_memory_moves_to_the_importer_when_given_up(pair: tuple[Client, Client]) -> None:
    """The importer shows nothing until the maker frees; small pieces bring their whole block."""
    a, b = pair
    a("globals().update(big=ok(alloc(512 * MIB)), small=ok(alloc(65536)), free_small=None)")
    handles = a("[list(ok(ipc_get(x))) for x in (big, small)]")
    b(f"globals().update(p=ok(ipc_open(bytes({handles[0]}))), q=ok(ipc_open(bytes({handles[1]}))))")
    assert b(f"[ok(ipc_open(bytes({handles[0]}))) == p, ok(address_range(q))[1], own(), total()]") == [
        True,
        65536,
        0,
        2 * 518 + 514,
    ]
    assert (a("own()"), a("ok(free(big))"), a("own()"), b("own()")) == (514, None, 2, 512)
    a.kill()
    assert (b("own()"), b("total()")) == (514, 518 + 514)
    assert b("[ipc_close(p), own(), ipc_close(p), own(), ipc_close(q), own(), ipc_close(q)]") == [
        0,
        514,
        0,
        2,
        0,
        0,
        1,
    ]


def test_vmm_shows_at_the_importer_once_maker_and_descriptor_are_gone(pair: tuple[Client, Client]) -> None:
    """An open descriptor holds the memory for nobody; each import is a handle of its own."""
    a, b = pair
    a("globals().update(h=ok(mem_create(512 * MIB, handles=FD)))")
    a("send(ok(export_fd(h)))")
    b("globals().update(fd=take())")
    b("globals().update(h1=ok(import_fd(fd)), h2=ok(import_fd(fd)), p=ok(reserve(512 * MIB)))")
    assert b("[h1 != h2, mem_map(p, 512 * MIB, h1), mem_release(h1), mem_release(h2), own()]") == [
        True,
        0,
        0,
        0,
        0,
    ]
    assert a("own()") == 512
    a.kill()
    assert (b("own()"), b("total()")) == (0, 518 + 512)
    assert b("[os.close(fd), own(), mem_unmap(p, 512 * MIB), own(), total()]") == [None, 512, 0, 0, 518]


def test_a_descriptor_alone_keeps_memory(pair: tuple[Client, Client]) -> None:
    """Without maker or importer the bytes stay on the card, can still be imported, and go with the fd."""
    a, b = pair
    a("send(ok(export_fd(ok(mem_create(64 * MIB, handles=FD)))))")
    b("globals().update(fd=take())")
    a.kill()
    assert b("[own(), total()]") == [0, 518 + 64]
    assert b("[mem_release(ok(import_fd(fd))), os.close(fd), own(), total()]") == [0, None, 0, 518]


def test_importing_your_own_memory_takes_nothing(pair: tuple[Client, Client]) -> None:
    """Each handle is its own, and the bytes are counted once."""
    a, _ = pair
    a("globals().update(h=ok(mem_create(64 * MIB, handles=FD)))")
    a("globals().update(fd=ok(export_fd(h)))")
    a("globals().update(k=ok(import_fd(fd)))")
    assert a("[k != h, own(), os.close(fd), mem_release(h), own(), mem_release(k), own()]") == [
        True,
        64,
        None,
        0,
        64,
        0,
        0,
    ]


def test_external_memory_takes_nothing_and_holds(pair: tuple[Client, Client]) -> None:
    """cuImportExternalMemory takes the descriptor over, and frees nothing that a buffer still maps."""
    a, b = pair
    a("send(ok(export_fd(ok(mem_create(64 * MIB, handles=FD)))))")
    b(
        "globals().update(E=type('E', (C.Structure,), {'_fields_': [('t', u32), ('fd', u64), ('x', u64),"
        "('size', u64), ('flags', u32), ('r', u32 * 16)]}), B=type('B', (C.Structure,), {'_fields_':"
        "[('at', u64), ('size', u64), ('flags', u32), ('r', u32 * 16)]}), e=ptr(), p=u64())"
    )
    assert b(
        "[call('cuImportExternalMemory', C.byref(e), C.byref(E(1, take(), 0, 64 * MIB))), own(),"
        "call('cuExternalMemoryGetMappedBuffer', C.byref(p), e, C.byref(B(0, 32 * MIB))), own()]"
    ) == [
        0,
        0,
        0,
        0,
    ]
    a.kill()
    assert b("[own(), call('cuDestroyExternalMemory', e), total() - 518, free(p.value), total() - 518]") == [
        64,
        0,
        64,
        0,
        0,
    ]


def test_an_imported_pool_is_never_shown(pair: tuple[Client, Client]) -> None:
    """It refuses allocation and attributes; its bytes stay on the card until the importer destroys it."""
    a, b = pair
    a("globals().update(pool=ok(pool_create(handles=FD)))")
    a("globals().update(p=ok(alloc_from(pool, 100 * MIB)))")
    a("send(ok(pool_export(pool)))")
    data = a("list(ok(pointer_export(p)))")
    b("globals().update(fd=take())")
    b("globals().update(pool=ok(pool_import(fd)))")
    b(f"globals().update(p=ok(pointer_import(pool, bytes({data}))))")
    b("os.close(fd)")
    assert b(
        f"[p == ok(pointer_import(pool, bytes({data}))), alloc_from(pool, 1)[0], own(),"
        "pool_attr(pool, 'reserved')[0]]"
    ) == [True, 1, 0, 1]
    assert a("own()") == 128
    a.kill()
    assert b("[own(), total() - 518, free_async(p), total() - 518, pool_destroy(pool), total() - 518]") == [
        0,
        128,
        0,
        128,
        0,
        0,
    ]


def test_multicast_objects_take_nothing_of_their_own(sim_env: SimEnv) -> None:
    """The memory is that of the handles bound to them."""
    code = """
        init()
        class P(C.Structure): _fields_ = [("n", u32), ("size", u64), ("handles", u64), ("flags", u64)]
        h = u64(); before = used(); r = call("cuMulticastCreate", C.byref(h), C.byref(P(2, 2 * MIB, 0, 0)))
        m = ok(mem_create(2 * MIB))
        say(r, call("cuMulticastAddDevice", h, 0),
            call("cuMulticastBindMem", h, 0, m, 0, 2 * MIB, 0), used() - before,
            mem_release(m), mem_release(h.value), used() - before)
    """
    assert ask(sim_env(SIMGPU_COUNT="2"), code) == [0, 0, 0, 2, 0, 0, 0]
