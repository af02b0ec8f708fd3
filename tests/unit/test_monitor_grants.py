"""KAI's rounding, row by row, and the verdict on a recorded limit."""

from __future__ import annotations

import pytest

from isolator.monitor import grants
from isolator.monitor.grants import MIB, Basis, Grant

# (annotations, node label, portion as KAI writes it, limit in MiB)
TABLE = [
    ({"gpu-memory": "4096"}, "15360", "0.27", 4147),
    ({"gpu-memory": "4096"}, "16384", "0.26", 4259),
    ({"gpu-memory": "4096"}, "23034", "0.18", 4146),
    ({"gpu-memory": "4096"}, "81559", "0.06", 4893),
    ({"gpu-memory": "4096"}, "143771", "0.03", 4313),
    ({"gpu-memory": "2000"}, "11264", "0.18", 2027),
    ({"gpu-memory": "2000"}, "143771", "0.02", 2875),
    ({"gpu-memory": "20480"}, "40960", "0.51", 20889),
    ({"gpu-fraction": "0.25"}, "15360", "0.25", 3840),
    ({"gpu-fraction": "0.5"}, "81559", "0.50", 40779),
    ({"gpu-fraction": "0.333"}, "15360", "0.33", 5068),
    ({"gpu-fraction": "0.125"}, "143771", "0.12", 17252),
]


@pytest.mark.parametrize(("annotations", "label", "portion", "mib"), TABLE)
def test_limit_follows_kais_rounding(annotations: dict[str, str], label: str, portion: str, mib: int) -> None:
    """Each row of the contract's table gives KAI's portion and limit."""
    assert Grant(Basis.KNOWN, portion, mib * MIB) == grants.expected(annotations, label)


@pytest.mark.parametrize(
    ("percent", "portion", "mib"),
    [(7, "0.08", 1600), (14, "0.15", 3000), (28, "0.29", 5800), (55, "0.56", 11200), (56, "0.57", 11399)],
)
def test_floating_point_lifts_an_exact_request_by_one_point(percent: int, portion: str, mib: int) -> None:
    """A request of exactly 7, 14, 28, 55 or 56 % gets one point more, and the product is cut, as in KAI."""
    grant = grants.expected({"gpu-memory": str(200 * percent)}, "20000")

    assert Grant(Basis.KNOWN, portion, mib * MIB) == grant


def test_other_exact_requests_are_not_lifted() -> None:
    """A request of exactly 25 % stays at 25 %."""
    assert grants.expected({"gpu-memory": "5000"}, "20000") == Grant(Basis.KNOWN, "0.25", 5000 * MIB)


def test_label_in_bytes_is_told_and_converted() -> None:
    """A label in bytes gives the scheduler's grant; the card-sized limit of the binder mismatches."""
    grant = grants.expected({"gpu-memory": "4096"}, str(15360 * MIB))

    assert Grant(Basis.LABEL_IN_BYTES, "0.27", 4147 * MIB) == grant
    assert grants.exceeds(grant, 15360 * MIB)


@pytest.mark.parametrize(
    ("annotations", "label", "basis"),
    [
        ({"gpu-memory": "4096"}, None, Basis.NO_LABEL),
        ({"gpu-memory": "4096"}, "80", Basis.NO_LABEL),
        ({"gpu-fraction": "0.5"}, None, Basis.NO_LABEL),
        ({"gpu-fraction": "0.5"}, "unknown", Basis.NO_LABEL),
        ({"gpu-fraction": "0.5"}, "", Basis.NO_LABEL),
        ({"gpu-fraction": "0.5"}, "-15360", Basis.NO_LABEL),
        ({"gpu-fraction": "0.5"}, "0", Basis.NO_LABEL),
        ({"gpu-fraction": "0.004"}, "15360", Basis.ZERO_PORTION),
        ({"gpu-fraction": "1"}, "15360", Basis.MALFORMED),
        ({"gpu-fraction": "nan"}, "15360", Basis.MALFORMED),
        ({"gpu-fraction": ""}, "15360", Basis.MALFORMED),
        ({"gpu-memory": "8000Mi"}, "15360", Basis.MALFORMED),
        ({"gpu-memory": "0"}, "15360", Basis.MALFORMED),
        ({"gpu-memory": "9" * 400}, "15360", Basis.MALFORMED),
        ({"gpu-memory": "\u0664\u0664"}, "15360", Basis.MALFORMED),
        ({"gpu-memory": "4096", "gpu-fraction": "0.5"}, "15360", Basis.AMBIGUOUS),
        ({"nvidia.com/container.a.gpu-memory.request": "4Gi"}, "15360", Basis.NVFRACTIONS),
        ({}, "15360", Basis.NO_FRACTION),
    ],
)
def test_no_limit_is_expected_where_kai_leaves_none(
    annotations: dict[str, str], label: str | None, basis: Basis
) -> None:
    """Where KAI writes no limit, or it cannot be known, there is a reason and no number (B093, B094)."""
    grant = grants.expected(annotations, label)

    assert basis == grant.basis
    assert grant.limit is None
    assert not grants.exceeds(grant, 80 << 30)


def test_legacy_annotation_wins_over_the_one_that_newer_kai_adds() -> None:
    """Newer KAI writes its own request annotation onto legacy pods too: the legacy one still decides."""
    both = {"gpu-fraction": "0.25", "nvidia.com/container.a.gpu-memory.request": "3840Mi"}

    assert Grant(Basis.KNOWN, "0.25", 3840 * MIB) == grants.expected(both, "15360")


@pytest.mark.parametrize(
    ("recorded", "verdict"),
    [
        (4147 * MIB, False),
        (4148 * MIB, False),
        (4148 * MIB + 1, True),
        (15360 * MIB, True),
        (64 * MIB, False),
        (0, False),
    ],
)
def test_only_a_higher_limit_is_a_mismatch(recorded: int, verdict: bool) -> None:
    """A limit up to 1 MiB above the grant, or any lower one, is fine; a higher one is not."""
    grant = grants.expected({"gpu-memory": "4096"}, "15360")

    assert verdict is grants.exceeds(grant, recorded)
