"""Charging, giving back and the sums, in one process."""

from __future__ import annotations

import errno
import threading
import time

import pytest
from corelib import CONTEXT, DATA, GIB, MIB, MODULE, Core, lib
from hypothesis import given, settings
from hypothesis import strategies as st

LIMIT = 4 * GIB


@pytest.fixture
def core():
    """A region in memory with a limit of 4 GiB on device 0."""
    with Core(claim=True) as made:
        made.limit(LIMIT)
        yield made


def columns(core: Core, device: int = 0) -> tuple[int, int, int, int]:
    """Data, context, module, total as HAMi's part shows them."""
    used = core.region.procs[core.slot].used[device]
    return used.data_size, used.context_size, used.module_size, used.total


def test_limit_is_reached_exactly(core):
    """The last byte fits, the next does not, and a refusal changes nothing."""
    assert core.charge(LIMIT)
    assert not core.charge(1)
    assert core.used() == core.own() == LIMIT
    core.give_back(4096)
    assert core.charge(1)
    assert not core.charge(1)
    assert core.ext.word[0][0] == LIMIT // 4096


def test_sizes_are_rounded_up_to_units(core):
    """A byte takes a unit, and gives one back."""
    assert core.charge(1)
    assert core.charge(4097)
    assert core.used() == 3 * 4096
    core.give_back(4097)
    core.give_back(1)
    assert core.used() == 0


def test_refusals_are_counted(core):
    """Each refusal counts once, with its size and its time."""
    before = time.time_ns() - 20_000_000
    assert not core.charge(LIMIT + 1)
    assert core.charge(LIMIT - MIB)
    assert not core.charge(2 * MIB)
    assert core.ext.refused[0] == 2
    assert core.ext.refused_bytes[0] == 2 * MIB
    assert before < core.ext.refused_last_ns[0] <= time.time_ns()
    assert core.ext.refused[1] == 0


@pytest.mark.parametrize("size", [1 << 44, (1 << 44) - 4096, 1 << 50, (1 << 63) - 1, (1 << 64) - 1])
def test_huge_requests_are_refused(core, size):
    """No size wraps around the arithmetic."""
    assert not core.charge(size)
    assert core.charge(GIB)
    assert not core.charge(size)
    assert core.used() == GIB


@pytest.mark.parametrize("limit", [(1 << 63) - 1, 1 << 44, (1 << 44) - 4096])
def test_huge_limits_do_not_overflow_a_word(limit):
    """Past what a word can hold a charge is refused, not carried into the other half."""
    with Core(claim=True) as core:
        core.limit(limit)
        most = (1 << 44) - 4096
        assert core.charge(most - GIB)
        assert not core.charge(GIB + 4096)
        assert core.charge(GIB)
        assert not core.charge(4096)
        assert core.used() == most
        assert core.ext.word[0][0] == 0xFFFFFFFF


def test_no_limit_grants_what_can_be_counted():
    """Without a limit everything is granted up to 16 TiB, the most that can be counted."""
    most = (1 << 44) - 4096
    with Core(claim=True) as core:
        assert core.charge(5 * GIB)
        assert core.used() == 5 * GIB
        assert not core.charge(1 << 62)
        assert core.charge(most - 5 * GIB)
        assert not core.charge(1)
        assert core.used() == most
        core.give_back(most)
        assert core.used() == 0


def test_forced_charge_goes_past_the_limit(core):
    """What the driver already holds is counted, and leaves no room for more."""
    core.force(5 * GIB)
    assert core.used() == 5 * GIB
    assert not core.charge(1)
    core.give_back(2 * GIB)
    assert core.charge(GIB)
    assert not core.charge(1)


def test_giving_back_too_much_is_clamped(core):
    """The count cannot go below zero; the mismatch is counted (B051)."""
    assert core.charge(GIB)
    core.give_back(2 * GIB)
    assert core.used() == 0
    assert core.ext.clamped == 1
    core.give_back(1)
    assert core.ext.clamped == 2
    assert core.ext.word[0][0] == 0
    assert columns(core) == (0, 0, 0, 0)
    assert core.charge(LIMIT)


def test_kinds_are_shown_in_their_columns(core):
    """Each kind has its column, and the columns always sum up to the total."""
    core.charge(GIB, kind=DATA)
    core.charge(300 * MIB, kind=CONTEXT)
    core.charge(20 * MIB, kind=MODULE)
    assert columns(core) == (GIB, 300 * MIB, 20 * MIB, GIB + 320 * MIB)
    core.give_back(300 * MIB, kind=CONTEXT)
    assert columns(core) == (GIB, 0, 20 * MIB, GIB + 20 * MIB)
    core.give_back(30 * MIB, kind=MODULE)
    assert columns(core) == (GIB - 10 * MIB, 0, 0, GIB - 10 * MIB)
    core.charge(MIB, kind=77)
    assert columns(core)[0] == GIB - 9 * MIB


def test_devices_are_apart(core):
    """A charge counts on its device alone; a device outside the table is nobody's (B064)."""
    core.limit(LIMIT, 3)
    assert core.charge(LIMIT, 3)
    assert core.used(0) == 0
    assert core.charge(GIB, 0)
    for device in (-1, 16, 1 << 30, -(1 << 31)):
        with pytest.raises(OSError) as caught:
            core.charge(1, device)
        assert caught.value.errno == errno.EINVAL
        core.force(1, device)
        core.give_back(1, device)
        assert core.used(device) == core.own(device) == 0


def test_ghosts_take_room(core):
    """Bytes of processes without a slot count like granted ones (D6)."""
    core.ext.ghost[0] = 3 * GIB
    assert core.used() == 3 * GIB
    assert not core.charge(GIB + 1)
    assert core.charge(GIB)
    core.ext.ghost[0] = (1 << 64) - 1
    assert core.used() > LIMIT
    assert not core.charge(1)


def test_peak_is_the_highest_sum(core):
    """The peak stays when bytes go."""
    core.charge(3 * GIB)
    core.give_back(3 * GIB)
    core.charge(GIB)
    assert core.ext.peak[0] == 3 * GIB
    core.force(5 * GIB)
    assert core.ext.peak[0] == 6 * GIB


def test_charge_needs_a_slot():
    """Without a slot nothing is charged and the caller is told."""
    with Core() as core:
        core.limit(LIMIT)
        with pytest.raises(OSError) as caught:
            core.charge(1)
        assert caught.value.errno == errno.EBADF
        core.force(1)
        core.give_back(1)
        assert core.used() == 0


@pytest.mark.parametrize("other", [0, 1, 1 << 32, (7 << 32) | 9, (1 << 64) - 1])
def test_foreign_write_into_own_word_heals(core, other):
    """The next change puts the own word right, whatever was written there, and reports it (B149)."""
    assert core.charge(GIB)
    core.ext.word[0][core.slot] = other
    assert core.own() == core.used() == GIB
    assert not core.charge(3 * GIB + 1)
    assert core.charge(3 * GIB)
    assert core.ext.word[0][core.slot] == LIMIT // 4096
    assert core.ext.flags & lib.VGPU_FLAG_TAMPERED


@pytest.mark.parametrize("high", [0, 1, 1024, 1025, (1 << 32) - 1])
def test_garbage_in_slot_high_is_bounded(core, high):
    """A foreign count of slots neither hides the own one nor leads out of the table."""
    core.ext.slot_high = high
    assert core.charge(LIMIT)
    assert core.used() == LIMIT
    assert not core.charge(1)
    assert core.ext.slot_high >= 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 2 * GIB)), max_size=60))
@settings(deadline=None)
def test_any_sequence_keeps_the_sum(steps):
    """After every step the sums are those of a plain model, and never past the limit."""
    with Core(claim=True) as core:
        core.limit(LIMIT)
        held = 0
        for grow, kind, size in steps:
            units = -(-size // 4096) * 4096
            if grow:
                assert core.charge(size, kind=kind) == (held + units <= LIMIT)
                held += units if held + units <= LIMIT else 0
            else:
                core.give_back(size, kind=kind)
                held -= min(units, held)
            shown = columns(core)
            assert held == core.used() == core.own() == shown[3] == sum(shown[:3])


def test_threads_keep_the_sum(core):
    """Threads that charge and give back at once leave nothing over and never pass the limit together."""
    held, worst, lock = 0, 0, threading.Lock()

    def worker(seed: int) -> None:
        nonlocal held, worst
        for i in range(2000):
            size = ((seed * 7919 + i * 104729) % 1500 + 1) * MIB
            if core.charge(size):
                with lock:
                    held += size
                    worst = max(worst, held)
                    held -= size
                core.give_back(size)

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst <= LIMIT
    assert core.used() == 0
    assert core.ext.clamped == 0
    assert columns(core) == (0, 0, 0, 0)
