"""The cluster's certificates: one CA, one for each server and each identity."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(common: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if group:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


def _alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            found.append(x509.DNSName(host))
    return found


class Authority:
    """A CA that writes what it signs into `folder` as `NAME.crt` and `NAME.key`."""

    def __init__(self, folder: Path, name: str = "cluster-test-ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name(name)
        built = self._builder(self.name, self.key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = built.sign(self.key, hashes.SHA256())
        self.path = folder / "ca.crt"
        self.path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        account = ec.generate_private_key(ec.SECP256R1())
        (folder / "sa.key").write_bytes(_pem(account))
        (folder / "sa.pub").write_bytes(
            account.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    def sign(self, name: str, common: str, group: str = "", hosts: Sequence[str] = ()) -> tuple[Path, Path]:
        """The files of a certificate and its key; with `hosts` it is a serving one, else a client's."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = self._builder(_name(common, group), key).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(_alternatives(hosts)), critical=False)
        signed = builder.sign(self.key, hashes.SHA256())
        crt, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        crt.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        private.write_bytes(_pem(key))
        return crt, private

    def kubeconfig(self, name: str, server: str, common: str, group: str = "") -> Path:
        """A kubeconfig file for an identity, with its certificates inside."""
        crt, key = self.sign(name, common, group)

        def data(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": data(self.path)}
        user = {"client-certificate-data": data(crt), "client-key-data": data(key)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": common, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": common}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(content))
        return path
