"""Renewal of serving certificate and CA: when, in which order, and that no call meets an untrusted pair."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store
from webhookkit import HOSTS, NOW, FakeApi, configuration, material, write_generation

from isolator.webhook import bundle, certs, keeper
from isolator.webhook.bundle import BundleWriter, Change, SecretStore
from isolator.webhook.health import Health
from isolator.webhook.keeper import SPREAD, Directory, Keeper, Source
from isolator.webhook.metrics import Metrics
from isolator.webhook.tls import ReloadingContext

DAY = dt.timedelta(days=1)
SHORT = certs.Lives(ca=dt.timedelta(minutes=6), leaf=dt.timedelta(minutes=2))


class Clock:
    """Time of the modules under test, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 0.0
        clock = self

        class Now(dt.datetime):
            @classmethod
            def now(cls, tz: dt.tzinfo | None = None) -> Now:
                return cls.fromtimestamp(NOW.timestamp() + clock.at, tz)

        for module in (bundle, keeper):
            monkeypatch.setattr(
                module, "dt", SimpleNamespace(datetime=Now, UTC=dt.UTC, timedelta=dt.timedelta)
            )
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.at))

    @property
    def now(self) -> dt.datetime:
        return NOW + dt.timedelta(seconds=self.at)


class Context(ReloadingContext):
    """Remembers the certificate that new connections get."""

    served = b""

    def load(self, certificate: bytes, key: bytes) -> None:
        super().load(certificate, key)
        self.served = certificate


class Replica:
    """One webhook's keeper, whose rounds are called by hand."""

    def __init__(self, api: FakeApi, source: Callable[[FakeApi], Source]) -> None:
        placeholder = material()
        self.context = Context(placeholder[certs.CERTIFICATE], placeholder[certs.KEY])
        self.context.served = b""
        self.health = Health()
        parts = (source(api), BundleWriter(api.api(), "c"))
        self.keeper = Keeper(lambda: parts, self.context, self.health, Metrics())

    @property
    def ready(self) -> bool:
        return self.health.problem is None


def stored(api: FakeApi) -> Source:
    return SecretStore(api.api(), "test", "tls", HOSTS, SHORT)


def trusts(pem: bytes, leaf: bytes, now: dt.datetime) -> bool:
    """Whether an API server whose caBundle is `pem` accepts the certificate."""
    verifier = (
        PolicyBuilder()
        .store(Store(x509.load_pem_x509_certificates(pem)))
        .time(now)
        .build_server_verifier(x509.DNSName(HOSTS[1]))
    )
    try:
        verifier.verify(x509.load_pem_x509_certificate(leaf), [])
    except x509.verification.VerificationError:
        return False
    return True


def test_is_due_after_two_thirds_of_its_life() -> None:
    """Two thirds count of the certificate's own life, or of the one that is asked for now, where shorter."""
    leaf = certs.issue_leaf(certs.issue_ca(NOW), HOSTS, NOW, 30 * DAY).certificate
    assert certs.due(leaf, 365 * DAY) == NOW + 20 * DAY
    assert certs.due(leaf, 3 * DAY) == NOW + 2 * DAY


def test_a_ca_is_renewed_after_two_thirds_of_its_life() -> None:
    """A due CA gets a successor that comes first and signs the new pair; the old one stays trusted."""
    before = material(HOSTS)
    later = NOW + 2440 * DAY
    fresh = certs.mend({**before, certs.KEY: b""}, HOSTS, NOW + 2400 * DAY)
    assert fresh[certs.CA] == before[certs.CA]
    assert certs.fault(fresh, HOSTS, NOW + 2430 * DAY) is None
    assert certs.fault(fresh, HOSTS, later) == "has a CA that is due for renewal"
    after = certs.mend(fresh, HOSTS, later)
    assert certs.split(after[certs.CA])[1:] == [before[certs.CA]]
    assert after[certs.CA_KEY] != before[certs.CA_KEY]
    assert trusts(after[certs.CA], fresh[certs.CERTIFICATE], later)
    assert trusts(after[certs.CA], after[certs.CERTIFICATE], later)
    assert not trusts(before[certs.CA], after[certs.CERTIFICATE], later)


def test_trust_is_added_and_ends_by_itself() -> None:
    """What is there stays until it ends, two at most; what nobody can read is replaced."""
    own, old, older, oldest = (material()[certs.CA] for _ in range(4))
    ended = material(now=NOW - dt.timedelta(days=4000))[certs.CA]
    assert certs.joined(own, b"", NOW) == certs.joined(own, b"garbage", NOW) == own
    assert certs.joined(own, old + ended, NOW) == own + old
    assert certs.joined(own, old + older + oldest, NOW) == own + old + older
    for same in (own + old, old + own, b"note\n" + old + own):
        assert certs.joined(own, same, NOW) == same
    with pytest.raises(ValueError):
        certs.joined(b"", own, NOW)


def test_replicas_of_two_generations_do_not_fight_over_ca_bundle() -> None:
    """One that has read the renewed Secret and one that has not leave each other's CA in peace."""
    api = FakeApi(configuration=configuration("a.example", "b.example"))
    writer, first, second = BundleWriter(api.api(), "c"), material()[certs.CA], material()[certs.CA]
    assert writer.ensure(first) is Change.FIRST
    assert writer.ensure(second) is Change.CHANGED
    assert [writer.ensure(pem) for pem in (first, second, first)] == [Change.NONE] * 3
    assert api.bundles() == [second + first] * 2


def test_a_pair_of_a_new_ca_waits_until_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Secret of the user's with another CA: caBundle first, then, when it has spread, the new pair; the old
    pair is served meanwhile, and at once given up when it has ended."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    first = material(HOSTS)
    write_generation(tmp_path, 1, first)
    replica = Replica(api, lambda _: Directory(tmp_path, with_ca=True))
    assert replica.keeper.round() and replica.ready
    second = material(HOSTS)
    write_generation(tmp_path, 2, second)
    clock.at = 100
    assert replica.keeper.round() and replica.ready
    assert api.bundles() == [second[certs.CA] + first[certs.CA]]
    assert replica.context.served == first[certs.CERTIFICATE]
    clock.at = 100 + SPREAD - 1
    assert replica.keeper.round()
    assert replica.context.served == first[certs.CERTIFICATE]
    clock.at = 100 + SPREAD
    assert replica.keeper.round()
    assert replica.context.served == second[certs.CERTIFICATE]
    third = material(HOSTS, NOW + 366 * DAY)
    write_generation(tmp_path, 3, third)
    clock.at = 366 * DAY.total_seconds()
    assert replica.keeper.round()
    assert replica.context.served == third[certs.CERTIFICATE]


def test_without_ca_bundle_the_old_pair_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where caBundle cannot be written a pair of another CA is not served, however long that lasts."""
    clock, api = Clock(monkeypatch), FakeApi(configuration=configuration("a.example"))
    first = material(HOSTS)
    write_generation(tmp_path, 1, first)
    replica = Replica(api, lambda _: Directory(tmp_path, with_ca=True))
    assert replica.keeper.round()
    write_generation(tmp_path, 2, material(HOSTS))
    api.refuse = {"patch configuration": 403}
    for clock.at in (10.0, 1000.0):
        assert not replica.keeper.round()
        assert replica.context.served == first[certs.CERTIFICATE]
        assert replica.ready
    api.refuse = {}
    assert replica.keeper.round()
    clock.at += SPREAD
    assert replica.keeper.round()
    assert replica.context.served != first[certs.CERTIFICATE]


def test_a_new_replica_waits_for_its_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where caBundle trusts others, the first pair of a new CA makes nobody ready before it has spread."""
    clock = Clock(monkeypatch)
    api = FakeApi(configuration=configuration("a.example"))
    BundleWriter(api.api(), "c").ensure(material()[certs.CA])
    replica = Replica(api, stored)
    assert replica.keeper.round()
    assert replica.context.served and not replica.ready
    clock.at = SPREAD
    assert replica.keeper.round() and replica.ready


@pytest.mark.parametrize("seed", range(3))
def test_no_call_meets_an_untrusted_certificate(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two replicas over many short lives of CA and pair, a restart now and then, an API server that sees
    caBundle late: whenever it calls a replica that is ready, it trusts what that one serves."""
    chance, clock = random.Random(seed), Clock(monkeypatch)
    api = FakeApi(configuration=configuration("a.example"))
    replicas = [Replica(api, stored) for _ in range(2)]
    due = [0.0, chance.uniform(0, 10)]
    seen: list[tuple[float, bytes]] = []
    authorities: set[bytes] = set()
    calls = 0
    while clock.at < 2000:
        clock.at += 1
        for i in range(2):
            if chance.random() < 1 / 900:
                replicas[i], due[i] = Replica(api, stored), clock.at
            if clock.at >= due[i]:
                assert replicas[i].keeper.round()
                due[i] = clock.at + chance.uniform(1, 10)
        seen.append((clock.at, api.bundles()[0]))
        authorities.update(certs.split(seen[-1][1]))
        late = next(pem for at, pem in reversed(seen) if at <= clock.at - chance.uniform(0, 5) or at == 1)
        for replica in replicas:
            if replica.ready:
                calls += 1
                assert trusts(late, replica.context.served, clock.now), clock.at
    assert calls > 3000
    assert len(authorities) > 6
    assert len(certs.split(seen[-1][1])) <= 1 + certs.OLD_CAS
