"""Certificates: what is made, what is turned down, and the exchange of the pair while serving."""

from __future__ import annotations

import datetime as dt
import logging
import socket
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from webhookkit import HOSTS, NOW, material, serving, until, write_generation

from isolator.errors import ContractError, UnavailableError
from isolator.webhook import certs
from isolator.webhook.health import Health
from isolator.webhook.keeper import Directory, Keeper
from isolator.webhook.metrics import Metrics
from isolator.webhook.tls import ReloadingContext


def _verify(leaf: bytes, bundle: bytes, host: str, now: dt.datetime) -> None:
    store = Store(x509.load_pem_x509_certificates(bundle))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(host))
    verifier.verify(x509.load_pem_x509_certificate(leaf), [])


@pytest.mark.parametrize("host", HOSTS)
def test_makes_a_certificate_that_clients_take(host: str) -> None:
    """The serving certificate verifies against its own bundle for each name of the Service (B075)."""
    data = material(HOSTS)
    for when in (NOW - dt.timedelta(minutes=59), NOW, NOW + dt.timedelta(days=364)):
        _verify(data[certs.CERTIFICATE], data[certs.CA], host, when)
    with pytest.raises(VerificationError):
        _verify(data[certs.CERTIFICATE], data[certs.CA], "other.test.svc", NOW)
    with pytest.raises(VerificationError):
        _verify(data[certs.CERTIFICATE], material(HOSTS)[certs.CA], host, NOW)


def test_makes_the_kind_of_certificates_that_are_promised() -> None:
    """P-256; the CA lives ten years and signs only leaves; a leaf one year, never longer than its CA."""
    ca = certs.issue_ca(NOW)
    leaf = certs.issue_leaf(ca, HOSTS, NOW)
    for pair in (ca, leaf):
        assert isinstance(pair.key.curve, ec.SECP256R1)
        assert pair.certificate.not_valid_before_utc == NOW - dt.timedelta(hours=1)
    assert ca.certificate.not_valid_after_utc - NOW == dt.timedelta(days=3652)
    assert leaf.certificate.not_valid_after_utc - NOW == dt.timedelta(days=365)
    basic = ca.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.critical, basic.value.ca, basic.value.path_length) == (True, True, 0)
    late = certs.issue_leaf(ca, HOSTS, NOW + dt.timedelta(days=3600))
    assert late.certificate.not_valid_after_utc == ca.certificate.not_valid_after_utc


def test_takes_a_service_name_of_any_length() -> None:
    """Names past the 64 characters of a common name work."""
    hosts = certs.service_names("s" * 63, "n" * 63)
    data = material(hosts)
    _verify(data[certs.CERTIFICATE], data[certs.CA], hosts[1], NOW)


def test_joins_bundles_without_repetition() -> None:
    """A bundle holds each CA once, in order, and nothing else of the texts."""
    one, two = material()[certs.CA], material()[certs.CA]
    assert certs.bundle(b"comment\n" + one, two, one) == one + two
    with pytest.raises(ValueError):
        certs.bundle(b"")


def _spoilt(kind: str) -> tuple[dict[str, bytes], str]:
    """Stored data with one fault, and a word of what is said of it."""
    good, other = material(HOSTS), material(HOSTS)
    late = dt.timedelta(days=400)
    spoilt: dict[str, tuple[dict[str, bytes], str]] = {
        "empty": ({}, "is empty"),
        "empty values": (dict.fromkeys(certs.DATA, b""), "is empty"),
        "no ca key": ({**good, certs.CA_KEY: b""}, "no usable CA"),
        "another ca": ({**good, certs.CA: other[certs.CA], certs.CA_KEY: other[certs.CA_KEY]}, "another CA"),
        "a leaf for a ca": (
            {**good, certs.CA: good[certs.CERTIFICATE], certs.CA_KEY: good[certs.KEY]},
            "no usable CA",
        ),
        "another key": ({**good, certs.KEY: other[certs.KEY]}, "no usable serving pair"),
        "garbage": ({**good, certs.CERTIFICATE: b"-----BEGIN CERTIFICATE-----\n"}, "no usable serving pair"),
        "other names": (material(certs.service_names("hook", "other")), "not made for hook.test"),
        "expired": ({**good, **_leaf(good, NOW - late)}, "ended at"),
        "from tomorrow": ({**good, **_leaf(good, NOW + dt.timedelta(days=1))}, "begins at"),
        "due": ({**good, **_leaf(good, NOW - dt.timedelta(days=300))}, "due for renewal"),
        "old ca": (material(HOSTS, NOW - dt.timedelta(days=4000)), "no usable CA"),
    }
    return spoilt[kind]


def _leaf(data: dict[str, bytes], now: dt.datetime) -> dict[str, bytes]:
    key = serialization.load_pem_private_key(data[certs.CA_KEY], None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    ca = certs.Pair(x509.load_pem_x509_certificate(data[certs.CA]), key)
    leaf = certs.issue_leaf(ca, HOSTS, now)
    return {certs.CERTIFICATE: leaf.certificate_pem(), certs.KEY: leaf.key_pem()}


@pytest.mark.parametrize(
    ("kind", "keeps_ca"),
    [
        ("empty", False),
        ("empty values", False),
        ("no ca key", False),
        ("another ca", True),
        ("a leaf for a ca", False),
        ("another key", True),
        ("garbage", True),
        ("other names", True),
        ("expired", True),
        ("from tomorrow", True),
        ("due", True),
        ("old ca", False),
    ],
)
def test_mends_what_cannot_be_served(kind: str, keeps_ca: bool) -> None:
    """Each fault of the stored data is named and mended; the CA stays where it can, so that caBundle does."""
    stored, said = _spoilt(kind)
    wrong = certs.fault(stored, HOSTS, NOW)
    assert wrong is not None and said in wrong
    mended = certs.mend(stored, HOSTS, NOW)
    assert certs.fault(mended, HOSTS, NOW) is None
    assert (mended[certs.CA] == stored.get(certs.CA)) is keeps_ca


def test_replaced_ca_stays_trusted_until_it_ends() -> None:
    """A CA whose key is lost is followed by another that stands in front: both replicas' pairs are taken."""
    old = material(HOSTS)
    after = certs.mend({**old, certs.CA_KEY: b""}, HOSTS, NOW)
    assert certs.fault(after, HOSTS, NOW) is None
    assert after[certs.CA].endswith(old[certs.CA]) and after[certs.CA] != old[certs.CA]
    for leaf in (old[certs.CERTIFICATE], after[certs.CERTIFICATE]):
        _verify(leaf, after[certs.CA], HOSTS[1], NOW)
    again = after
    for _ in range(4):
        again = certs.mend({**again, certs.CA_KEY: b"lost"}, HOSTS, NOW)
    assert len(x509.load_pem_x509_certificates(again[certs.CA])) == 1 + certs.OLD_CAS

    ended = certs.issue_ca(NOW - dt.timedelta(days=9), dt.timedelta(days=8)).certificate_pem()
    leaf = old[certs.CERTIFICATE]
    for behind in (ended, leaf):
        mended = certs.mend({**old, certs.CA: old[certs.CA] + behind, certs.KEY: b""}, HOSTS, NOW)
        assert mended[certs.CA] == old[certs.CA], "what has ended or is no CA is not trusted on"


def test_has_nothing_against_what_it_makes() -> None:
    """Data made here are served as they are, to shortly before they are due."""
    assert certs.fault(material(HOSTS), HOSTS, NOW + dt.timedelta(days=240)) is None


def _handshake(port: int, trusted: bytes) -> bytes:
    """The certificate (DER) that a new connection is shown."""
    context = ssl.create_default_context(cadata=trusted.decode())
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True) or b""


def _rsa(data: dict[str, bytes]) -> dict[str, bytes]:
    """The same leaf on an RSA key, self-signed: another key type, as a user's own Secret may have."""
    key = rsa.generate_private_key(65537, 2048)
    old = x509.load_pem_x509_certificate(data[certs.CERTIFICATE])
    builder = x509.CertificateBuilder(
        old.subject,
        old.subject,
        key.public_key(),
        x509.random_serial_number(),
        NOW,
        NOW + dt.timedelta(days=1),
    )
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = builder.add_extension(names, critical=False).sign(key, old.signature_hash_algorithm)
    pem = made.public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return {certs.CERTIFICATE: pem, certs.KEY: private, certs.CA: pem}


def test_serves_a_renewed_secret_without_a_restart(tmp_path: Path) -> None:
    """The kubelet's exchange of `..data` reaches new connections, old ones go on (B076), for any key type."""
    first, second = material(), material()
    third = _rsa(first)
    write_generation(tmp_path, 1, first)
    with serving() as served, served.client(first[certs.CA]) as held:
        metrics, health = Metrics(), Health()
        source = Directory(tmp_path, with_ca=True)
        keeper = Keeper(lambda: (source, None), served.context, health, metrics, interval=0.05)
        value = metrics.registry.get_sample_value
        expiry = "kai_isolator_certificate_expiry_timestamp_seconds"
        keeper.start()
        try:
            until(lambda: not health.problem)
            assert held.get("/healthz").status_code == 200
            for number, data in enumerate((second, third, first), start=2):
                write_generation(tmp_path, number, data)
                until(lambda n=number: value("kai_isolator_certificate_loads_total", {"result": "ok"}) == n)
                shown = ssl.DER_cert_to_PEM_cert(_handshake(served.port, data[certs.CA]))
                assert shown.encode() == data[certs.CERTIFICATE]
                assert value(expiry) == certs.expiry(data[certs.CERTIFICATE]).timestamp()
                assert held.get("/healthz").status_code == 200
        finally:
            keeper.stop()
            keeper.join(5)


@pytest.mark.parametrize(
    ("made_for", "warned"), [(HOSTS, False), (("*.test.svc",), False), (("*.svc",), True), (("other",), True)]
)
def test_warns_of_a_certificate_for_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made_for: tuple[str, ...], warned: bool
) -> None:
    """A pair of somebody else's that the API server would not accept is served, and a line says why."""
    data = material(made_for)
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    context = ReloadingContext(data[certs.CERTIFICATE], data[certs.KEY])
    source = Directory(tmp_path, with_ca=False)
    keeper = Keeper(lambda: (source, None), context, Health(), Metrics(), hosts=HOSTS[1:2])
    assert keeper.round() and keeper.round()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == warned and all(f"is not made for {HOSTS[1]}" in line for line in said)


def test_keeps_the_pair_while_a_new_one_does_not_fit(tmp_path: Path) -> None:
    """A half-written or mismatched pair is counted and said once; what was served is served on."""
    first, second = material(), material()
    context = ReloadingContext(first[certs.CERTIFICATE], first[certs.KEY])
    health, metrics = Health(), Metrics()
    keeper = Keeper(lambda: (Directory(tmp_path, with_ca=False), None), context, health, metrics)
    for name, content in first.items():
        (tmp_path / name).write_bytes(content)
    assert keeper.round()
    (tmp_path / certs.CERTIFICATE).write_bytes(second[certs.CERTIFICATE])
    served = context._current
    assert not keeper.round()
    (tmp_path / certs.CERTIFICATE).write_bytes(second[certs.CERTIFICATE][:90])
    assert not keeper.round()
    (tmp_path / certs.KEY).unlink()
    assert not keeper.round()
    assert context._current is served
    assert health.problem is None
    assert metrics.registry.get_sample_value(
        "kai_isolator_certificate_loads_total", {"result": "failed"}
    ) == pytest.approx(2)
    (tmp_path / certs.CERTIFICATE).write_bytes(second[certs.CERTIFICATE])
    (tmp_path / certs.KEY).write_bytes(second[certs.KEY])
    assert keeper.round()
    assert context._current is not served


def test_says_which_file_is_missing(tmp_path: Path) -> None:
    """A folder without the files is one line that names the file and all that are needed."""
    with pytest.raises(
        UnavailableError, match=r"tls\.crt: No such file.*it takes tls\.crt, tls\.key, ca\.crt"
    ):
        Directory(tmp_path, with_ca=True).read()


def test_does_not_ask_for_a_passphrase() -> None:
    """An encrypted key is an error that says so, not a prompt."""
    data = material()
    key = serialization.load_pem_private_key(data[certs.KEY], None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    with pytest.raises(ContractError, match="key is encrypted"):
        ReloadingContext(data[certs.CERTIFICATE], sealed)
