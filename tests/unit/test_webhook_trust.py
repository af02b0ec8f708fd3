"""Odd Secrets and unlucky moments: what is spoilt is written anew, no pair is served before it is trusted."""

from __future__ import annotations

import base64
import datetime as dt
import random
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from test_webhook_renewal import SHORT, Clock, Replica, stored, trusts
from webhookkit import HOSTS, NOW, FakeApi, configuration, material, write_generation

from isolator.webhook import certs, keeper, tls
from isolator.webhook.bundle import BundleWriter, Change
from isolator.webhook.keeper import SPREAD, Directory

GOOD = material(HOSTS)


def _pem(der: bytes, what: str = "CERTIFICATE") -> bytes:
    return f"-----BEGIN {what}-----\n{base64.b64encode(der).decode()}\n-----END {what}-----\n".encode()


def _der(pem: bytes) -> bytearray:
    return bytearray(x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER))


def _version(pem: bytes, version: int) -> bytes:
    der = _der(pem)
    der[der.index(b"\xa0\x03\x02\x01\x02") + 4] = version
    return _pem(bytes(der))


def _key(private: Any) -> bytes:
    kind = serialization.PrivateFormat.PKCS8
    return bytes(private.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption()))


def _foreign_ca() -> dict[str, bytes]:
    """A CA of a user's, with an RSA key."""
    made = rsa.generate_private_key(65537, 2048)
    return {certs.CA: GOOD[certs.CA], certs.CA_KEY: _key(made)}


def _other_curve() -> dict[str, bytes]:
    return {certs.KEY: _key(ec.generate_private_key(ec.SECP521R1()))}


def _serves(data: dict[str, bytes]) -> None:
    """That a replica can start with these data."""
    assert certs.fault(data, HOSTS, NOW) is None
    certs.due_first(data)
    certs.bundle(data[certs.CA])
    tls.context(data[certs.CERTIFICATE], data[certs.KEY])


@pytest.mark.parametrize(
    "spoilt",
    [
        {certs.CA: _version(GOOD[certs.CA], 5)},
        {certs.CERTIFICATE: _version(GOOD[certs.CERTIFICATE], 1)},
        {certs.CERTIFICATE: GOOD[certs.CERTIFICATE] + GOOD[certs.CA]},
        {certs.CERTIFICATE: GOOD[certs.CERTIFICATE] + _version(GOOD[certs.CA], 9)},
        _foreign_ca(),
        _other_curve(),
    ],
)
def test_odd_data_are_written_anew(spoilt: dict[str, bytes]) -> None:
    """Whatever a hand or a restore has put into the Secret, the built-in mode serves again by itself."""
    data = GOOD | spoilt
    assert certs.fault(data, HOSTS, NOW) is not None
    _serves(certs.mend(data, HOSTS, NOW))


def test_no_flipped_byte_stops_the_renewal() -> None:
    """Each is either no matter, or named and mended; the library raises a dozen kinds of error for them."""
    chance, faults = random.Random(5), 0
    for _ in range(400):
        name = chance.choice((certs.CA, certs.CERTIFICATE, certs.KEY, certs.CA_KEY))
        if name in (certs.CA, certs.CERTIFICATE):
            der, what = _der(GOOD[name]), "CERTIFICATE"
        else:
            lines = GOOD[name].decode().split("\n")
            der, what = bytearray(base64.b64decode("".join(lines[1:-2]))), "PRIVATE KEY"
        der[chance.randrange(len(der))] ^= chance.randrange(1, 256)
        data = GOOD | {name: _pem(bytes(der), what)}
        certs.joined(GOOD[certs.CA], data[name], NOW)
        if certs.fault(data, HOSTS, NOW) is None:
            _serves(data)
        else:
            faults += 1
            _serves(certs.mend(data, HOSTS, NOW))
    assert faults > 300


def test_a_damaged_certificate_is_named() -> None:
    """A user's Secret is served with a warning; its words come from here."""
    der = _der(GOOD[certs.CERTIFICATE])
    at = der.index(bytes.fromhex("551d11"))  # the names it is made for
    der[at + 5] ^= 0x55
    assert "damaged" in str(certs.leaf_fault(_pem(bytes(der)), HOSTS, NOW))
    with pytest.raises(ValueError):
        certs.expiry(_version(GOOD[certs.CA], 5))


def test_a_replica_that_starts_in_a_renewal_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """caBundle has the new CA, and only since another replica put it there a moment ago."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    old = Replica(api, stored)
    assert old.keeper.round() and old.ready
    clock.at = SHORT.ca.total_seconds() * 2 / 3 + 1
    assert old.keeper.round()
    assert len(certs.split(api.bundles()[0])) == 2
    clock.at += 1
    new = Replica(api, stored)
    assert new.keeper.round() and not new.ready
    clock.at += SPREAD
    assert new.keeper.round() and new.ready
    monkeypatch.setattr(keeper, "RECENT", dt.timedelta(seconds=30))
    clock.at += 60
    late = Replica(api, stored)
    assert late.keeper.round() and late.ready


def test_a_ca_that_comes_back_has_to_spread_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Secret restored from a backup: its CA was served once, and is not in caBundle any more."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    generations = [material(HOSTS) for _ in range(4)]
    replica = Replica(api, lambda _: Directory(tmp_path, with_ca=True))
    for number, data in enumerate(generations):
        write_generation(tmp_path, number, data)
        assert replica.keeper.round()
        clock.at += SPREAD
        assert replica.keeper.round()
        assert replica.context.served == data[certs.CERTIFICATE]
        clock.at += 100
    first = generations[0]
    assert first[certs.CA] not in api.bundles()[0]
    write_generation(tmp_path, 9, first)
    assert replica.keeper.round()
    assert replica.context.served == generations[-1][certs.CERTIFICATE]
    clock.at += SPREAD
    assert replica.keeper.round()
    assert replica.context.served == first[certs.CERTIFICATE]


def test_an_emptied_ca_bundle_hurries_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Somebody empties it amid a renewal: API servers that have not seen that trust the old pair."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    first, second = material(HOSTS), material(HOSTS)
    write_generation(tmp_path, 1, first)
    replica = Replica(api, lambda _: Directory(tmp_path, with_ca=True))
    assert replica.keeper.round()
    write_generation(tmp_path, 2, second)
    clock.at = 100
    api.configuration = configuration("a.example")
    assert replica.keeper.round()
    assert replica.context.served == first[certs.CERTIFICATE]
    clock.at += SPREAD
    assert replica.keeper.round()
    assert replica.context.served == second[certs.CERTIFICATE]


def test_a_late_patch_takes_nothing_back() -> None:
    """A patch taken late, after another replica added a newer CA, is refused and made anew."""
    api = FakeApi(configuration=configuration("a.example"))
    base, early, later = (material()[certs.CA] for _ in range(3))
    BundleWriter(api.api(), "c").ensure(base)

    def other(_: str) -> None:
        api.before = lambda _name: None
        assert BundleWriter(api.api(), "c").ensure(later) is Change.CHANGED

    api.before = other
    assert BundleWriter(api.api(), "c").ensure(early) is Change.CHANGED
    assert set(certs.split(api.bundles()[0])) == {base, early, later}


def test_a_clock_that_jumps_makes_no_flood_of_cas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Years ahead on one of two replicas and back: caBundle stays small, and what is served stays trusted."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    first, second = Replica(api, stored), Replica(api, stored)
    assert first.keeper.round() and second.keeper.round()
    before = api.bundles()[0]
    home, seen = clock.at, set(certs.split(before))
    for round_ in range(12):
        home += 10
        clock.at = home + (SHORT.ca.total_seconds() * 0.8 if round_ < 6 else 0)
        first.keeper.round()
        seen |= set(certs.split(api.bundles()[0]))
        clock.at = home
        second.keeper.round()
        assert trusts(api.bundles()[0] or b"", second.context.served, clock.now)
        seen |= set(certs.split(api.bundles()[0]))
    assert len(seen) <= 4
    assert len(certs.split(api.bundles()[0])) <= 1 + certs.OLD_CAS
