"""Certificates on the cluster: the built-in ones, a user's Secret, and cert-manager's part played by hand."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from harness import Cluster, wait_for
from pki import Authority
from product import Product
from releases import KINDS, Release, release

PAIR = ("tls.crt", "tls.key")


@pytest.fixture(scope="module")
def builtin(cluster: Cluster, product: Product) -> Iterator[Release]:
    """Two replicas that were installed at once, into a namespace that had no certificate."""
    with release(cluster, "tls-builtin", replicaCount=2) as made:
        made.upgrade()
        yield made


def served(made: Release) -> set[x509.Certificate]:
    """The certificates of all replicas, each verified against caBundle and the Service's name."""
    pods = made.pods()
    assert pods
    return {made.served(pod) for pod in pods}


def test_builtin_certificate_is_ready_before_the_webhook(builtin: Release) -> None:
    """B075: when Helm's --wait ends, caBundle is the Secret's CA, and both replicas, which raced for the
    Secret, serve the one pair in it for the names that the API server calls."""
    secret = builtin.secret()

    assert len(builtin.pods()) == 2
    assert builtin.bundle() == secret["ca.crt"]
    assert served(builtin) == {x509.load_pem_x509_certificate(secret["tls.crt"])}
    assert builtin.admit() == "injected"
    certificate = served(builtin).pop()
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    base = f"{builtin.webhook}.{builtin.name}"
    assert set(alternative.get_values_for_type(x509.DNSName)) == {
        base,
        f"{base}.svc",
        f"{base}.svc.cluster.local",
    }


def test_lost_certificate_comes_back_with_its_ca(builtin: Release) -> None:
    """A deleted Secret and a wiped caBundle are put back within a minute by the running replicas, with the
    same CA; so is a Secret with garbage in it."""
    before = builtin.secret()
    cluster = builtin.cluster
    pods = {pod["metadata"]["uid"] for pod in builtin.pods()}

    cluster.kubectl("delete", "secret", f"{builtin.webhook}-tls", f"--namespace={builtin.name}")
    entries = cluster.get(KINDS, builtin.configuration)["webhooks"]
    wipe = [{"op": "remove", "path": f"/webhooks/{i}/clientConfig/caBundle"} for i in range(len(entries))]
    cluster.kubectl("patch", KINDS, builtin.configuration, "--type=json", f"--patch={json.dumps(wipe)}")
    assert not builtin.bundle()
    wait_for(lambda: builtin.secret() == before, 60, "the deleted Secret to come back")
    wait_for(lambda: builtin.bundle() == before["ca.crt"], 60, "caBundle to come back")

    garbage = {key: base64.b64encode(b"garbage").decode() for key in before}
    put_secret(builtin, garbage)
    wait_for(lambda: builtin.secret() == before, 60, "the spoilt Secret to be replaced")
    assert builtin.bundle() == before["ca.crt"]
    assert {pod["metadata"]["uid"] for pod in builtin.pods()} == pods
    builtin.wait_admits()


def put_secret(made: Release, data: Mapping[str, str]) -> None:
    patch = json.dumps({"data": data})
    words = [f"--namespace={made.name}", "secret", f"{made.webhook}-tls", f"--patch={patch}"]
    made.cluster.kubectl("patch", *words)


def test_garbage_at_the_first_start_is_replaced(builtin: Release) -> None:
    """A Secret that nobody can serve gets a new CA when no replica knows a better one."""
    before = builtin.secret()
    cluster, scale = (
        builtin.cluster,
        ["scale", f"deployment/{builtin.webhook}", f"--namespace={builtin.name}"],
    )
    cluster.kubectl(*scale, "--replicas=0")
    wait_for(lambda: not builtin.pods(), 60, "the replicas to go")
    gone = ["wait", "pod", "--for=delete", "--all", f"--namespace={builtin.name}", "--timeout=60s"]
    cluster.kubectl(*gone)
    put_secret(builtin, {key: base64.b64encode(b"garbage").decode() for key in before})

    cluster.kubectl(*scale, "--replicas=2")
    cluster.wait_rollout(f"deployment/{builtin.webhook}", namespace=builtin.name)
    after = builtin.secret()
    assert after["ca.crt"] != before["ca.crt"]
    assert builtin.bundle() == after["ca.crt"] + before["ca.crt"]
    assert served(builtin) == {x509.load_pem_x509_certificate(after["tls.crt"])}
    builtin.wait_admits()


def test_upgrade_keeps_the_certificate(builtin: Release) -> None:
    """B077: an upgrade that replaces the pods leaves Secret and caBundle as they are, at each moment."""
    before, trusted, pods = builtin.secret(), builtin.bundle(), uids_of(builtin)

    builtin.upgrade({"logging": {"level": "debug"}}, wait="")
    assert builtin.bundle() == trusted
    builtin.cluster.wait_rollout(f"deployment/{builtin.webhook}", namespace=builtin.name)
    assert not pods & uids_of(builtin)
    assert builtin.secret() == before
    assert builtin.bundle() == trusted
    assert builtin.admit() == "injected"


# ---- a Secret of the user's -------------------------------------------------------------------------


class Signed:
    """A CA of the user's, and the Secrets that it makes for a release."""

    def __init__(self, folder: Path, made: Release) -> None:
        self.authority, self.made = Authority(folder, f"{made.name} {folder.name}"), made
        self.ca = self.authority.path.read_bytes()
        self.count = 0

    def put(self, name: str, hosts: list[str] | None = None) -> x509.Certificate:
        """Creates or changes the Secret with a new pair."""
        self.count += 1
        base = f"{self.made.webhook}.{self.made.name}"
        paths = self.authority.sign(f"pair-{self.count}", "webhook", hosts=hosts or [base, f"{base}.svc"])
        pair = [path.read_bytes() for path in paths]
        data = dict(zip((*PAIR, "ca.crt"), [*pair, self.ca], strict=True))
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "kubernetes.io/tls",
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        self.made.cluster.apply(secret, self.made.name)
        return x509.load_pem_x509_certificate(pair[0])


def test_existing_secret_is_served_and_reloaded(cluster: Cluster, product: Product, tmp_path: Path) -> None:
    """B076: a pair of the user's is served, its CA taken from ca.crt or from the value; when the Secret
    changes, new connections see the new certificate within a minute and a half, without a restart."""
    with release(cluster, "tls-existing") as made:
        cluster.kubectl("create", "namespace", made.name)
        signed = Signed(tmp_path / "pki", made)
        first = signed.put("mine")
        made.upgrade({"tls": {"existingSecret": "mine"}})
        assert made.bundle() == signed.ca
        assert served(made) == {first}
        assert made.admit() == "injected"
        assert not made.secret()

        made.upgrade({"tls": {"existingSecret": "mine", "caBundle": signed.ca.decode()}})
        assert made.bundle() == signed.ca
        spec = made.pods()[0]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert made.admit() == "injected"

        uids = [pod["metadata"]["uid"] for pod in made.pods()]
        second, begun = signed.put("mine"), time.monotonic()
        wait_for(lambda: served(made) == {second}, 90, "the new certificate to be served", every=1)
        print(f"a rotated Secret is served after {time.monotonic() - begun:.0f} s")
        assert [pod["metadata"]["uid"] for pod in made.pods()] == uids
        assert made.pods()[0]["status"]["containerStatuses"][0]["restartCount"] == 0
        assert made.admit() == "injected"


# ---- cert-manager -----------------------------------------------------------------------------------


def definition(kind: str, plural: str) -> dict[str, Any]:
    """A custom resource of cert-manager's that takes anything."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.cert-manager.io"},
        "spec": {
            "group": "cert-manager.io",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


@pytest.fixture
def cert_manager(cluster: Cluster) -> Iterator[None]:
    """Its kinds Certificate and Issuer, without its controllers."""
    made = [definition("Certificate", "certificates"), definition("Issuer", "issuers")]
    cluster.apply(made)
    words = [f"crd/{each['metadata']['name']}" for each in made]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *words)
    yield
    cluster.kubectl("delete", *words, "--wait=false")


def test_cert_manager(cluster: Cluster, product: Product, cert_manager: None, tmp_path: Path) -> None:
    """What cert-manager does with our Certificate makes the webhook work, which sets caBundle itself; a pair
    of another CA is served without a restart, and every admission meanwhile succeeds: the CA before stays
    trusted. cert-manager's controllers are played by hand."""
    wanted = {"tls": {"certManager": {"enabled": True}}}
    with release(cluster, "tls-manager") as made:
        made.upgrade(wanted, wait="")
        certificates = cluster.get("certificates", namespace=made.name)["items"]
        spec = {each["metadata"]["name"]: each["spec"] for each in certificates}
        issuers = [each["metadata"]["name"] for each in cluster.get("issuers", namespace=made.name)["items"]]
        assert {each["issuerRef"]["name"] for each in spec.values()} <= set(issuers)

        serving = spec[f"{made.name}-serving-cert"]
        signed = Signed(tmp_path / "pki", made)
        first = signed.put(serving["secretName"], serving["dnsNames"])
        cluster.wait_rollout(f"deployment/{made.webhook}", namespace=made.name, timeout=180)
        assert served(made) == {first}
        made.wait_admits()

        made.upgrade(wanted | {"logging": {"level": "debug"}})
        assert made.bundle() == signed.ca
        assert made.admit() == "injected"

        other = Signed(tmp_path / "other", made)
        second, uids = other.put(serving["secretName"], serving["dnsNames"]), uids_of(made)
        wait_for(lambda: admitted_by(made) == {second}, 120, "the new CA's certificate", every=1)
        assert made.bundle() == other.ca + signed.ca
        assert uids_of(made) == uids


def uids_of(made: Release) -> set[str]:
    return {pod["metadata"]["uid"] for pod in made.pods()}


def admitted_by(made: Release) -> set[x509.Certificate]:
    """The certificates served, after an admission that must succeed whichever they are."""
    assert made.admit() == "injected"
    return served(made)
