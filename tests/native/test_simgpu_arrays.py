"""Arrays and mipmaps of the simulated card: the sizes that an H200 took for the same shapes."""

from __future__ import annotations

import json

import pytest
from conftest import SimEnv
from simgpu_ask import ask

U8, HALF, FLOAT = 1, 0x10, 0x20
LAYERED, CUBE, SPARSE, DEFERRED = 1, 4, 0x40, 0x80

# width, height, depth, format, channels, flags, bytes that cuArrayGetMemoryRequirements asked for
ARRAYS = [
    (1, 0, 0, FLOAT, 1, 0, 65536), (65536, 0, 0, FLOAT, 1, 0, 2097152), (131072, 0, 0, FLOAT, 4, 0, 16777216),
    (65536, 0, 0, U8, 1, 0, 524288), (64, 64, 0, FLOAT, 1, 0, 65536), (160, 160, 0, FLOAT, 1, 0, 196608),
    (300, 300, 0, FLOAT, 1, 0, 524288), (400, 400, 0, FLOAT, 1, 0, 851968), (450, 450, 0, FLOAT, 1, 0,
        983040),
    (257, 257, 0, FLOAT, 1, 0, 458752), (520, 512, 0, FLOAT, 1, 0, 1114112), (700, 700, 0, FLOAT, 1, 0,
        2162688),
    (1000, 1000, 0, FLOAT, 1, 0, 4128768), (1000, 1000, 0, U8, 1, 0, 1048576), (1000, 1000, 0, HALF, 2, 0,
        4128768),
    (1023, 1023, 0, FLOAT, 1, 0, 4194304), (1025, 1025, 0, FLOAT, 1, 0, 4849664), (1024, 1025, 0, FLOAT, 1, 0,
        4718592),
    (1025, 1024, 0, FLOAT, 1, 0, 4259840), (2000, 3000, 0, FLOAT, 4, 0, 98304000), (3001, 2001, 0, U8, 1, 0,
        6160384),
    (4097, 4097, 0, FLOAT, 1, 0, 69533696), (100000, 3, 0, FLOAT, 1, 0, 3211264), (3, 60000, 0, FLOAT, 1, 0,
        3866624),
    (131072, 64, 0, U8, 1, 0, 8388608), (64, 64, 64, FLOAT, 1, 0, 1048576), (100, 100, 100, FLOAT, 1, 0,
        5242880),
    (200, 300, 50, FLOAT, 1, 0, 16187392), (255, 255, 17, HALF, 1, 0, 4194304), (512, 512, 64, FLOAT, 1, 0,
        67108864),
    (10, 10, 1000, FLOAT, 1, 0, 1048576), (128, 128, 3, U8, 4, 0, 262144), (256, 256, 10, FLOAT, 1, LAYERED,
        2621440),
    (1000, 0, 10, FLOAT, 1, LAYERED, 327680), (1000, 1000, 7, FLOAT, 1, LAYERED, 28901376),
    (256, 256, 6, FLOAT, 1, CUBE, 1572864), (256, 256, 12, FLOAT, 1, CUBE | LAYERED, 3145728),
]  # fmt: skip

# width, height, depth, format, channels, flags, levels, bytes
MIPMAPS = [
    (1024, 1024, 0, FLOAT, 1, 0, 1, 4194304), (1024, 1024, 0, FLOAT, 1, 0, 2, 5242880),
    (1024, 1024, 0, FLOAT, 1, 0, 3, 5505024), (1024, 1024, 0, FLOAT, 1, 0, 4, 5570560),
    (1024, 1024, 0, FLOAT, 1, 0, 11, 5636096), (4096, 4096, 0, FLOAT, 1, 0, 2, 83886080),
    (4096, 4096, 0, FLOAT, 1, 0, 13, 89522176), (1000, 1000, 0, U8, 4, 0, 5, 5570560), (64, 64, 0, FLOAT, 1,
        0, 7, 65536),
    (64, 64, 64, FLOAT, 1, 0, 4, 1245184), (256, 256, 10, FLOAT, 1, LAYERED, 4, 3538944), (4096, 0, 0, FLOAT,
        1, 0, 5, 262144),
]  # fmt: skip


@pytest.fixture
def h200(sim_env: SimEnv) -> dict[str, str]:
    """One simulated H200."""
    return sim_env(SIMGPU_MODEL="H200")


def test_required_bytes_are_those_of_the_card(h200: dict[str, str]) -> None:
    """37 array shapes and 12 mipmaps, asked while mapping is deferred, which takes nothing."""
    code = """
        init(); before = used(); arrays, mipmaps = json.loads(sys.argv[1]); bad = []
        need = lambda name, a: (C.c_size_t * 8)() and None
        class R(C.Structure): _fields_ = [("size", size_t), ("align", size_t), ("r", u32 * 4)]
        for *shape, flags, want in arrays:
            a, r = ok(array3d(*shape, flags | 128)), R()
            ok(call("cuArrayGetMemoryRequirements", C.byref(r), ptr(a), 0))
            if (r.size, r.align) != (want, 65536): bad.append((shape, want, r.size))
        for *shape, flags, levels, want in mipmaps:
            m, r = ok(mipmap(*shape[:3], levels, *shape[3:], flags | 128)), R()
            ok(call("cuMipmappedArrayGetMemoryRequirements", C.byref(r), ptr(m), 0))
            if r.size != want: bad.append((shape, levels, want, r.size))
        say(bad, used() - before)
    """
    assert ask(h200, code, json.dumps([ARRAYS, MIPMAPS])) == [[], 0]


@pytest.mark.parametrize(
    ("shape", "count", "mib"),
    [
        ("(32, 32)", 400, 2), ("(64, 64)", 400, 8), ("(65, 65)", 400, 16), ("(96, 96)", 400,
            20), ("(128, 128)", 400, 26),
        ("(160, 160)", 400, 68), ("(200, 200)", 400, 90), ("(256, 256)", 400, 100), ("(300, 300)", 400, 200),
        ("(512, 512)", 400, 400), ("(520, 512)", 4, 8), ("(1025, 1025)", 4, 24), ("(2000, 3000, 0, 32, 4)", 1,
            94),
        ("(1000, 0, 10, 32, 1, 1)", 64, 22), ("(200, 300, 50)", 4, 64),
    ],
)  # fmt: skip
def test_arrays_share_blocks_as_on_the_card(h200: dict[str, str], shape: str, count: int, mib: int) -> None:
    """So many arrays of a shape take so many MiB, and all of it goes back."""
    code = f"""
        init(); more, made = grown(lambda: (0, [ok(array3d(*{shape})) for _ in range({count})]))
        for a in made: ok(array_destroy(a))
        say(more, used() - 518)
    """
    assert ask(h200, code) == [mib, 0]


def test_arrays_share_no_block_with_linear_memory_or_other_texels(h200: dict[str, str]) -> None:
    """Each texel size has blocks of its own; a mipmap of the same fits in."""
    code = """
        init()
        say(grow(array3d, 64, 64), grow(alloc, 16384), grow(array3d, 64, 64, 0, 1), grow(array3d, 9, 9, 0, 32,
            4),
                    grow(mipmap, 64, 64, 0, 7), grow(array3d, 64))
    """
    assert ask(h200, code) == [2, 2, 2, 2, 0, 0]


def test_mipmaps_take_their_levels_and_lend_them(h200: dict[str, str]) -> None:
    """A level is an array of no memory, and cannot be destroyed by itself."""
    code = """
        init(); more, m = grown(mipmap, 1024, 1024, 0, 11)
        level = lambda n: out(ptr, "cuMipmappedArrayGetLevel", ptr(m), n)
        a, extra = ok(level(1)), grow(level, 2); d = (size_t * 4)()
        ok(call("cuArrayGetDescriptor_v2", d, ptr(a)))
        say(more, extra, list(d)[:2], level(11)[0], array_destroy(a), ok(level(1)) == a, grow(mipmap_destroy,
            m),
            mipmap(64, 64, 0, 8)[0])
    """
    assert ask(h200, code) == [6, 0, [512, 512], 1, 1, True, -6, 1]


def test_sparse_and_deferred_arrays_take_nothing(h200: dict[str, str]) -> None:
    """Their memory is what is mapped into them; a plain array has no requirements to ask for."""
    code = """
        init(); b = (C.c_ubyte * 64)()
        say(grow(array3d, 4096, 4096, 0, 32, 1, 64), grow(array3d, 4096, 4096, 0, 32, 1, 128),
            call("cuArrayGetMemoryRequirements", b, ptr(ok(array3d(64, 64))), 0), array3d(4096, 4096, 0, 32,
                1, 192)[0])
    """
    assert ask(h200, code) == [0, 0, 1, 1]


def test_wrong_shapes_are_refused(h200: dict[str, str]) -> None:
    """Zero width, unknown formats, three channels, too large, a wrong handle."""
    code = """
        init(); say(array3d(0)[0], array3d(9, 9, 0, 77)[0], array3d(9, 9, 0, 32, 3)[0], array3d(1 << 20)[0],
                    array_destroy(12345), mipmap_destroy(12345))
    """
    assert ask(h200, code) == [1, 1, 1, 1, 400, 400]
