"""Certificates as pure functions of data and time: make, judge, join. No files, no cluster.

The Secret holds tls.crt, tls.key (serving pair), ca.crt (one or more CA certificates, the newest first) and
ca.key (key of the newest CA), all PEM.
"""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BACKDATED: Final = dt.timedelta(hours=1)
"""Clocks of the API server and of the other replica may be behind ours: what is not valid yet is refused by
the one and written anew by the other."""
OLD_CAS: Final = 2
"""Former CAs that stay trusted behind the present one, until they end."""
RENEW_AFTER: Final = 2 / 3
"""Share of a certificate's life after which it is due."""


@dataclass(frozen=True)
class Lives:
    """How long a CA and a serving certificate are made for."""

    ca: dt.timedelta = dt.timedelta(days=3652)
    leaf: dt.timedelta = dt.timedelta(days=365)


LIVES: Final = Lives()
_ODD: Final = (
    *(ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature),
    *(x509.InvalidVersion, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""What the library raises for a certificate or key that was spoilt, or that it does not know."""

CERTIFICATE, KEY, CA, CA_KEY = DATA = ("tls.crt", "tls.key", "ca.crt", "ca.key")


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """The names that the API server may call the webhook by; it uses the second."""
    base = f"{service}.{namespace}"
    return (base, f"{base}.svc", f"{base}.svc.cluster.local")


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
    end: dt.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    never = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*never, "encipher_only", "decipher_only"), False),
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def issue_ca(now: dt.datetime, life: dt.timedelta = LIVES.ca) -> Pair:
    """A new certificate authority, ECDSA P-256, that may sign serving certificates and nothing below them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("kai-resource-isolator webhook CA")
    certificate = (
        _builder(name, name, key, key, now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Pair(certificate, key)


def issue_leaf(ca: Pair, hosts: Sequence[str], now: dt.datetime, life: dt.timedelta = LIVES.leaf) -> Pair:
    """A serving certificate for `hosts`, ECDSA P-256, that does not outlive its CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + life, ca.certificate.not_valid_after_utc)
    certificate = (
        # A common name holds 64 characters, a Service's name may be longer: clients read the SANs alone.
        _builder(_name("kai-resource-isolator webhook"), ca.certificate.subject, key, ca.key, now, end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(h) for h in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Pair(certificate, key)


def due(certificate: x509.Certificate, life: dt.timedelta) -> dt.datetime:
    """When two thirds are over of its life, or of `life` where certificates are meant to live shorter now."""
    made, end = certificate.not_valid_before_utc + BACKDATED, certificate.not_valid_after_utc
    return made + min(end - made, life) * RENEW_AFTER


def bundle(*pems: bytes) -> bytes:
    """The CA certificates in `pems`, each once, in order, without comments. Raises ValueError without one."""
    return b"".join(dict.fromkeys(one for pem in pems for one in _pems(_parse(pem))))


def split(pem: bytes) -> list[bytes]:
    """The certificates in `pem`, each for itself; none where it is something else."""
    return _pems(_certificates(pem))


def joined(own: bytes, others: bytes, now: dt.datetime) -> bytes:
    """What is to be trusted where `others` were: the CAs in `own`, then those of `others`, whose pairs may
    still be served, until they end and OLD_CAS at most. `others` as they are where nothing is missing.

    `others` may be anything; ValueError where `own` is no PEM.
    """
    mine, known = split(bundle(own)), _certificates(others)
    valid = _pems(one for one in known if now < one.not_valid_after_utc)
    kept = [pem for pem in valid if pem not in mine]
    if set(_pems(known)) == {*mine, *kept} and len(kept) <= OLD_CAS:
        return others
    return b"".join((*mine, *kept[:OLD_CAS]))


def is_successor(pem: bytes, now: dt.datetime, age: dt.timedelta) -> bool:
    """Whether the first CA in `pem` has others behind it and was made here at most `age` ago, or by a clock
    that is ahead by as much."""
    first, *others = _parse(pem)
    return bool(others) and abs(now - first.not_valid_before_utc - BACKDATED) < age


def expiry(pem: bytes) -> dt.datetime:
    """When the first certificate in `pem` ends. Raises ValueError."""
    return _parse(pem)[0].not_valid_after_utc


def _dns_names(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return set(names.get_values_for_type(x509.DNSName))


def leaf_fault(pem: bytes, hosts: Iterable[str], now: dt.datetime) -> str | None:
    """What a client would dislike in the serving certificate, in a few words; None where it is fine."""
    try:
        leaf = _parse(pem)[0]
        made_for = _dns_names(leaf)
    except _ODD:
        return "is not a PEM certificate, or is damaged"
    missing = sorted(host for host in hosts if not {host, f"*.{host.partition('.')[2]}"} & made_for)
    if missing:
        return f"is not made for {missing[0]}"
    if now >= leaf.not_valid_after_utc:
        return f"ended at {leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    if now < leaf.not_valid_before_utc:
        return f"begins at {leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}"
    return None


def _load(certificate: bytes, key: bytes) -> Pair | None:
    """The pair in two PEM texts, where they belong together and are of the kind made here."""
    with contextlib.suppress(*_ODD):
        first, private = _parse(certificate)[0], serialization.load_pem_private_key(key, None)
        if isinstance(private, ec.EllipticCurvePrivateKey) and private.public_key() == first.public_key():
            return Pair(first, private)
    return None


def _usable_ca(stored: Mapping[str, bytes], now: dt.datetime) -> Pair | None:
    ca = _load(stored.get(CA, b""), stored.get(CA_KEY, b""))
    if ca is None or not ca.certificate.not_valid_before_utc <= now < ca.certificate.not_valid_after_utc:
        return None
    return ca if _may_sign(ca.certificate) and _signed_by(ca.certificate, ca.certificate) else None


def _may_sign(certificate: x509.Certificate) -> bool:
    with contextlib.suppress(x509.ExtensionNotFound, *_ODD):
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    return False


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether it is of that CA and as that CA signed it."""
    with contextlib.suppress(*_ODD):
        certificate.verify_directly_issued_by(issuer)
        return True
    return False


def _parse(pem: bytes) -> list[x509.Certificate]:
    """One certificate at least. Raises ValueError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except _ODD as error:
        raise ValueError(str(error)) from error


def _certificates(pem: bytes) -> list[x509.Certificate]:
    """Those in `pem`; none where it is something else."""
    with contextlib.suppress(ValueError):
        return _parse(pem)
    return []


def _pems(certificates: Iterable[x509.Certificate]) -> list[bytes]:
    return [one.public_bytes(serialization.Encoding.PEM) for one in certificates]


def due_first(stored: Mapping[str, bytes], lives: Lives = LIVES) -> dt.datetime:
    """When the first of CA and serving certificate is due, of data that have no fault."""
    ca, leaf = (x509.load_pem_x509_certificates(stored[key])[0] for key in (CA, CERTIFICATE))
    return min(due(ca, lives.ca), due(leaf, lives.leaf))


def fault(
    stored: Mapping[str, bytes], hosts: Sequence[str], now: dt.datetime, lives: Lives = LIVES
) -> str | None:
    """Why the Secret's data cannot be served as they are, in a few words; None where they can."""
    if not any(stored.get(key) for key in DATA):
        return "is empty"
    ca = _usable_ca(stored, now)
    if ca is None:
        return "has no usable CA"
    leaf = _load(stored.get(CERTIFICATE, b""), stored.get(KEY, b""))
    if leaf is None or len(_certificates(stored[CERTIFICATE])) > 1:
        return "has no usable serving pair"
    wrong = leaf_fault(stored[CERTIFICATE], hosts, now)
    if wrong:
        return f"has a certificate that {wrong}"
    for what, one, life in (("certificate", leaf, lives.leaf), ("CA", ca, lives.ca)):
        if now >= due(one.certificate, life):
            return f"has a {what} that is due for renewal"
    return None if _signed_by(leaf.certificate, ca.certificate) else "has a certificate of another CA"


def mend(
    stored: Mapping[str, bytes], hosts: Sequence[str], now: dt.datetime, lives: Lives = LIVES
) -> dict[str, bytes]:
    """Data that can be served: a new serving pair, under the stored CA where that is usable and not due.

    A kept CA leaves every caBundle valid. One that is replaced stays trusted behind its successor until it
    ends, as long as other replicas may serve pairs of its.
    """
    ca = _usable_ca(stored, now)
    if ca is None or now >= due(ca.certificate, lives.ca):
        ca = issue_ca(now, lives.ca)
    leaf = issue_leaf(ca, hosts, now, lives.leaf)
    old = (one for one in _certificates(stored.get(CA, b"")) if one != ca.certificate)
    former = _pems(one for one in old if _may_sign(one) and now < one.not_valid_after_utc)
    return {
        CERTIFICATE: leaf.certificate_pem(),
        KEY: leaf.key_pem(),
        CA: bundle(ca.certificate_pem(), *former[:OLD_CAS]),
        CA_KEY: ca.key_pem(),
    }
