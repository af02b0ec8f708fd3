"""The limit parser: the table of the documentation, and everything else is malformed."""

from __future__ import annotations

import errno
import random
from fractions import Fraction

import pytest
from corelib import GIB, MIB, Core, ffi, lib
from hypothesis import given
from hypothesis import strategies as st


def parse(text: str | bytes) -> int:
    """Bytes, or a negative errno."""
    raw = text.encode() if isinstance(text, str) else text
    out = ffi.new("uint64_t *", 12345)
    rc = lib.vgpu_limit_parse(ffi.from_buffer(raw), len(raw), out)
    assert rc == 0 or out[0] == 12345, "a refused text leaves the result alone"
    return out[0] if rc == 0 else rc


ACCEPTED = {
    "4147m": 4147 * MIB,
    "4147M": 4147 * MIB,
    "4Gi": 4 * GIB,
    "4GB": 4 * GIB,
    "4GiB": 4 * GIB,
    "4g": 4 * GIB,
    "4gb": 4 * GIB,
    "4Gib": 4 * GIB,
    "1.5g": 3 * GIB // 2,
    "0.1t": (1 << 40) // 10,
    "1t": 1 << 40,
    "65536k": 64 * MIB,
    "65536KiB": 64 * MIB,
    "67108864": 64 * MIB,
    "67108864b": 64 * MIB,
    "67108864B": 64 * MIB,
    "67108864.9": 64 * MIB,
    "0000000000000000000000000000000064m": 64 * MIB,
    "4147m\n": 4147 * MIB,
    " \t4147m \r\n": 4147 * MIB,
    "\n4147m": 4147 * MIB,
    "9223372036854775807": (1 << 63) - 1,
    "8388607t": 8388607 << 40,
    "64." + "0" * 400 + "1m": 64 * MIB,
}

EMPTY = ["", " ", "\n", " \t\r\n"]

MALFORMED = [
    *("0", "0m", "0.0g", "-1", "-1m", "+4g", "abc", "m", "g", ".", ".5g", "1.", "1.g", "1..5g", "1.5.5g"),
    *(
        "1e9",
        "1E9",
        "0x40000000",
        "4x",
        "4 g",
        "4g m",
        "4gg",
        "4gmi",
        "4ii",
        "4i",
        "4ib",
        "4GIB",
        "4gI",
        "4bi",
    ),
    *("4mbb", "4,5g", "4_000m", "4g;", '"4g"', "4g\n\n", "\n4g\n", "4\ng", "4g #", "inf", "nan", "\u0661g"),
    # A unit mistake: nobody wants less than 64 MiB.
    *("1", "4147", "63m", "65535k", "67108863", "63.999m", "0.0624g"),
]

TOO_BIG = [
    *(
        "9223372036854775808",
        "18446744073709551616",
        "99999999999g",
        "8388608t",
        "9" * 500,
        "1" + "0" * 100 + "k",
    ),
]


@pytest.mark.parametrize(("text", "expected"), ACCEPTED.items())
def test_limit_is_read(text, expected):
    """Powers of 1024 in either case, with i and b where they are meant (W-A22)."""
    assert expected == parse(text)


@pytest.mark.parametrize("text", EMPTY)
def test_nothing_is_not_a_limit(text):
    """White space alone is told apart from nonsense."""
    assert parse(text) == -errno.ENODATA


@pytest.mark.parametrize("text", MALFORMED)
def test_nonsense_is_never_a_limit(text):
    """What is not a plain size is refused, never read as `none` or as its first digits."""
    assert parse(text) == -errno.EINVAL


@pytest.mark.parametrize("text", TOO_BIG)
def test_overflow_is_told(text):
    """A limit over 2^63-1 does not wrap around."""
    assert parse(text) == -errno.ERANGE


@pytest.mark.parametrize("text", [b"4g\0", b"\0", b"4\0g", b"4147m\0\n", b"4\xffg", b"\xc2\xa04g"])
def test_bytes_that_are_no_text_are_malformed(text):
    """A NUL neither ends nor hides a limit."""
    assert parse(text) == -errno.EINVAL


UNITS = {
    "": 0,
    "b": 0,
    "k": 10,
    "Ki": 10,
    "kB": 10,
    "m": 20,
    "MiB": 20,
    "g": 30,
    "GB": 30,
    "t": 40,
    "TiB": 40,
}


@given(st.integers(0, 10**14), st.text("0123456789", max_size=40), st.sampled_from(sorted(UNITS)))
def test_any_decimal_is_exact(whole, fraction, unit):
    """The result is the floor of the exact product, for any number of digits."""
    number = f"{whole}.{fraction}" if fraction else str(whole)
    value = int(Fraction(number) * (1 << UNITS[unit]))
    expected = -errno.ERANGE if value >= 1 << 63 else value if value >= 64 * MIB else -errno.EINVAL
    assert expected == parse(number + unit)


@given(st.binary(max_size=24))
def test_any_bytes_are_answered(raw):
    """Whatever the bytes: a size of at least 64 MiB or an error."""
    result = parse(raw)
    assert result >= 64 * MIB or result in (-errno.EINVAL, -errno.ENODATA, -errno.ERANGE)


@pytest.fixture
def core():
    """A region in memory."""
    with Core(claim=True) as made:
        yield made


def limit(core: Core) -> int:
    """The limit in force."""
    return lib.vgpu_core_limit(core.handle, 0)


def tampered(core: Core) -> bool:
    """Whether the region is marked."""
    return bool(core.ext.flags & lib.VGPU_FLAG_TAMPERED)


@pytest.mark.parametrize("found", [0, 8 * GIB, 1 << 40, (1 << 64) - 1])
def test_recorded_limit_cannot_be_lifted(core, found):
    """A higher or missing word in the tenant's file changes nothing and is reported (B149)."""
    core.limit(4 * GIB)
    core.region.limit[0] = found
    assert limit(core) == 4 * GIB
    assert tampered(core)
    assert not core.charge(4 * GIB + 1)


def test_recorded_limit_can_be_lowered(core):
    """A lower word is honoured at once, by the next charge."""
    core.limit(4 * GIB)
    assert core.charge(GIB)
    core.region.limit[0] = 2 * GIB
    assert limit(core) == 2 * GIB
    assert not core.charge(GIB + 1)
    assert core.charge(GIB)
    assert not tampered(core)


def test_first_recorded_limit_stays(core):
    """The second process of a container neither replaces the record nor takes it for tampering."""
    core.region.limit[0] = 4 * GIB
    core.limit(3 * GIB)
    assert core.region.limit[0] == 4 * GIB
    assert limit(core) == 3 * GIB
    assert not tampered(core)


def test_process_without_a_limit_takes_the_recorded_one(core):
    """A process that lost its environment is held to what the first one recorded (B082)."""
    assert limit(core) == 0
    core.region.limit[0] = 4 * GIB
    assert limit(core) == 4 * GIB
    assert not core.charge(5 * GIB)


def test_limits_are_by_device(core):
    """Each device has its own; a number outside the table is nobody's."""
    for device in range(16):
        core.limit((device + 1) * GIB, device)
    assert [(device + 1) * GIB for device in range(16)] == list(core.region.limit)
    for device in (-1, 16, random.randint(17, 1 << 30)):
        core.limit(GIB, device)
        assert lib.vgpu_core_limit(core.handle, device) == 0
