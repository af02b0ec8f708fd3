"""The Secret and caBundle: creation, races, repair, and what is said where the API server says no."""

from __future__ import annotations

import datetime as dt
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import urllib3
from webhookkit import HOSTS, FakeApi, configuration, material, until

from isolator.errors import UnavailableError
from isolator.webhook import bundle, certs
from isolator.webhook.bundle import ApiError, BundleWriter, Change, SecretStore
from isolator.webhook.health import Health
from isolator.webhook.keeper import Keeper
from isolator.webhook.kube import Api
from isolator.webhook.metrics import Metrics
from isolator.webhook.tls import ReloadingContext

NAMES = ("vgpu.example", "second.example")


def store(api: FakeApi) -> SecretStore:
    return SecretStore(api.api(), "test", "tls", HOSTS)


def keeper(api: FakeApi, health: Health, metrics: Metrics | None = None, interval: float = 0.02) -> Keeper:
    pair = certs.issue_ca(dt.datetime.now(dt.UTC))
    context = ReloadingContext(pair.certificate_pem(), pair.key_pem())
    parts = (store(api), BundleWriter(api.api(), "c"))
    return Keeper(lambda: parts, context, health, metrics or Metrics(), interval)


def test_creates_the_secret() -> None:
    """Without a Secret one is made, of type kubernetes.io/tls, and read back."""
    api = FakeApi()
    data = store(api).read()
    assert data == api.secret_data()
    assert certs.fault(data, HOSTS, dt.datetime.now(dt.UTC)) is None
    assert api.secret is not None and api.secret["type"] == "kubernetes.io/tls"


def test_leaves_a_good_secret_alone() -> None:
    """A Secret that can be served is read and never written, whatever else is in it."""
    api = FakeApi()
    api.put_secret({**material(HOSTS), "note": b"mine"})
    secrets = store(api)
    assert secrets.read() == secrets.read() == {key: api.secret_data()[key] for key in certs.DATA}
    assert set(api.calls) == {"get secret"}


def test_two_replicas_that_create_at_once_serve_the_same_ca() -> None:
    """The replica whose creation comes second reads what the first one wrote."""
    api = FakeApi()
    winners: list[dict[str, bytes]] = []

    def other_was_first(name: str) -> None:
        api.before = lambda _name: None
        winners.append(store(api).read())

    api.before = other_was_first
    assert store(api).read() == winners[0]
    assert api.calls.count("post secret") == 2


def test_fills_in_an_empty_secret_and_keeps_its_labels() -> None:
    """A Secret rendered empty by a chart or a GitOps tool is filled in; labels and other keys stay."""
    for empty in ({}, dict.fromkeys((certs.CERTIFICATE, certs.KEY, "other"), b"")):
        api = FakeApi()
        api.put_secret(empty, labels={"app": "x"})
        assert store(api).read().keys() == set(certs.DATA)
        assert api.secret is not None and api.secret["metadata"]["labels"] == {"app": "x"}
        assert ("other" in api.secret["data"]) is ("other" in empty)
    api.secret = {"metadata": {"name": "s", "resourceVersion": "1"}, "data": None}
    assert store(api).read() == api.secret_data()


def test_a_replacement_never_overwrites_a_newer_one() -> None:
    """Two replicas that mend the same Secret agree: the write is guarded by its resourceVersion."""
    api = FakeApi()
    api.put_secret({**material(HOSTS), certs.KEY: b"garbage"})
    newer = material(HOSTS)

    def other_was_first(name: str) -> None:
        api.before = lambda _name: None
        api.put_secret(newer)

    api.before = other_was_first
    assert store(api).read() == newer
    assert api.secret_data() == newer


def test_gives_up_on_a_secret_that_always_changes() -> None:
    """A Secret that somebody changes before each write is an error, not an endless loop."""
    api = FakeApi()
    api.put_secret({})
    api.before = lambda _name: api.put_secret({})
    with pytest.raises(ApiError, match="changed by somebody else"):
        store(api).read()


@pytest.mark.parametrize("lost", ["deleted", "emptied"])
def test_puts_back_what_it_served(lost: str) -> None:
    """A Secret lost or emptied while serving gets the same CA again: no other replica falls out of trust."""
    api = FakeApi()
    secrets = store(api)
    before = secrets.read()
    if lost == "deleted":
        api.secret = None
    else:
        api.put_secret({})
    assert secrets.read() == before == api.secret_data()


def test_takes_over_what_another_replica_wrote() -> None:
    """A good Secret counts more than what is served."""
    api = FakeApi()
    secrets = store(api)
    secrets.read()
    renewed = material(HOSTS)
    api.put_secret(renewed)
    assert secrets.read() == renewed


def test_renews_the_serving_pair_under_the_same_ca(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that becomes due while it is served is followed by one of the same CA: caBundle stays valid."""

    class Later(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Later:
            return cls.fromtimestamp(time.time() + 300 * 86400, tz)

    api = FakeApi()
    secrets = store(api)
    before = secrets.read()
    monkeypatch.setattr(bundle, "dt", SimpleNamespace(datetime=Later, UTC=dt.UTC))
    after = secrets.read()
    assert after[certs.CERTIFICATE] != before[certs.CERTIFICATE]
    assert (after[certs.CA], after[certs.CA_KEY]) == (before[certs.CA], before[certs.CA_KEY])
    assert after == api.secret_data()


def test_sets_ca_bundle_on_each_webhook_and_again_when_wiped() -> None:
    """Each entry gets the bundle, and again when somebody wipes or changes it; else nothing is written."""
    api = FakeApi(configuration=configuration(*NAMES))
    writer = BundleWriter(api.api(), "c")
    pem = material()[certs.CA]
    assert writer.ensure(pem) is Change.FIRST
    assert api.bundles() == [pem, pem]
    assert writer.ensure(pem) is Change.NONE
    assert api.calls.count("patch configuration") == 1
    assert api.configuration is not None
    del api.configuration["webhooks"][1]["clientConfig"]["caBundle"]
    api.configuration["webhooks"][0]["clientConfig"]["caBundle"] = "Cg=="
    assert writer.ensure(pem) is Change.CHANGED
    assert api.bundles() == [pem, pem]


def test_never_writes_into_an_entry_that_moved() -> None:
    """Entries that move between look and write fail the patch's test, and the next try is right."""
    api = FakeApi(configuration=configuration(*NAMES))

    def moved(name: str) -> None:
        api.before = lambda _name: None
        api.configuration = configuration("inserted.example", *NAMES)
        api.configuration["metadata"]["resourceVersion"] = "7"

    api.before = moved
    pem = material()[certs.CA]
    assert BundleWriter(api.api(), "c").ensure(pem) is Change.FIRST
    assert api.bundles() == [pem] * 3
    assert api.calls.count("patch configuration") == 2


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        (
            "get secret",
            403,
            "not allowed to get Secret test/tls: grant that to the webhook's service account",
        ),
        ("post secret", 403, "not allowed to create Secret test/tls"),
        ("get secret", 401, "does not accept the service account's token"),
        ("get secret", 500, "answered 500"),
        ("get configuration", 404, "MutatingWebhookConfiguration c does not exist"),
        ("get configuration", 403, "not allowed to get MutatingWebhookConfiguration c"),
        ("patch configuration", 403, "not allowed to patch MutatingWebhookConfiguration c"),
    ],
)
def test_says_once_what_is_missing_and_recovers(
    call: str, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is one line that names right and object, said once; tries go on until it is granted."""
    api = FakeApi(configuration=configuration(*NAMES), refuse={call: status})
    health = Health()
    thread = keeper(api, health)
    with caplog.at_level(logging.INFO):
        thread.start()
        try:
            until(lambda: api.calls.count(call) >= 3)
            assert said in str(health.problem)
            assert "\n" not in str(health.problem)
            assert caplog.text.count(said) == 1
            api.refuse.clear()
            until(lambda: health.problem is None)
            assert api.bundles() == [api.secret_data()[certs.CA]] * 2
            until(lambda: "all right again" in caplog.text)
        finally:
            thread.stop()
            thread.join(5)


def test_stays_ready_while_the_api_server_is_away() -> None:
    """Once ready, an API server that does not answer takes no replica out of service."""
    api = FakeApi(configuration=configuration(*NAMES))
    health = Health()
    work = keeper(api, health)
    assert work.round() and health.problem is None

    def gone(*_: object, **__: object) -> None:
        raise urllib3.exceptions.ConnectTimeoutError("no route")

    api.request = gone  # type: ignore[assignment, method-assign]
    assert not work.round()
    assert health.problem is None


def test_outlives_a_surprise(caplog: pytest.LogCaptureFixture) -> None:
    """An error of a kind nobody thought of is logged, and the next round runs."""
    api = FakeApi(configuration=configuration(*NAMES))
    broken = iter([RuntimeError("surprise")])
    health = Health()
    work = keeper(api, health)
    real = api.request

    def once(*arguments: object, **options: object) -> object:
        for error in broken:
            raise error
        return real(*arguments, **options)  # type: ignore[arg-type]

    api.request = once  # type: ignore[assignment, method-assign]
    assert not work.round()
    assert "unexpected RuntimeError" in str(health.problem)
    assert work.round()


def test_a_configuration_without_webhooks_is_not_ready() -> None:
    """A configuration that has no entry to carry the bundle is said so."""
    api = FakeApi(configuration={"metadata": {"name": "c"}})
    with pytest.raises(ApiError, match="has no webhooks"):
        BundleWriter(api.api(), "c").ensure(b"pem")


def test_says_when_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside of a pod, or without a mounted service account token, one line says what is missing."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(UnavailableError, match="give the pod its service account's token"):
        Api()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UnavailableError, match="no access to the API server"):
        Api()


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b""])
def test_distrusts_what_is_no_object(answer: bytes) -> None:
    """A proxy's page in place of an object is one line, and nothing is written."""
    api = FakeApi()
    page = SimpleNamespace(status=200, reason="OK", data=answer, release_conn=lambda: None)
    api.request = lambda *_, **__: page  # type: ignore[assignment, method-assign]
    with pytest.raises(ApiError, match="the API server's answer is not"):
        store(api).read()
