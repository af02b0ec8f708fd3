"""AdmissionReview v1, in and out: plain functions of data.

What comes in is distrusted; a review that cannot be understood raises ContractError with one line.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from isolator.errors import ContractError

API_VERSION: Final = "admission.k8s.io/v1"
KIND: Final = "AdmissionReview"
MAX_BODY: Final = 20 << 20
"""Bytes. The API server takes 3 MiB and writes each `<`, `>` and `&` in them as six characters, which makes
18; an UPDATE brings two objects, each of the 1.5 MiB that etcd stores. The envelope is small. Were less
taken, a tenant could get a pod past a webhook whose failure policy is Ignore by its size."""
MAX_WARNING: Final = 120
"""Characters of one warning, as the API advises."""
MAX_WARNINGS: Final = 4096
"""Characters of all warnings of one answer; the API server drops what is beyond."""


@dataclass(frozen=True)
class Review:
    """The request of one AdmissionReview. `pod` is untrusted: it is a dict and nothing more is known."""

    uid: str
    operation: str
    resource: tuple[str, str, str]
    kind: tuple[str, str, str]
    subresource: str
    namespace: str
    name: str
    dry_run: bool
    pod: dict[str, Any]

    def _is(self, operation: str, subresource: str) -> bool:
        return (
            self.operation == operation
            and self.resource == ("", "v1", "pods")
            and self.kind == ("", "v1", "Pod")
            and self.subresource == subresource
        )

    @property
    def creates_pod(self) -> bool:
        """Whether a pod is to be made: injected, or left alone with a reason."""
        return self._is("CREATE", "")

    @property
    def adds_ephemeral(self) -> bool:
        """Whether a debug container is to be added to a running pod: never injected, perhaps denied."""
        return self._is("UPDATE", "ephemeralcontainers")

    @property
    def concerns_us(self) -> bool:
        """Whether this is what the webhook is for; anything else is allowed as it is."""
        return self.creates_pod or self.adds_ephemeral

    @property
    def reference(self) -> str:
        """namespace/name for the log; a name that the API server is still to make ends in `*`."""
        name = self.name
        if not name:
            metadata = self.pod.get("metadata")
            made = metadata.get("generateName") if isinstance(metadata, dict) else None
            name = f"{made if isinstance(made, str) else ''}*"
        return one_line(f"{self.namespace}/{name}", 320)


def one_line(text: str, limit: int) -> str:
    """`text` without line breaks and other unprintable characters, cut to `limit` characters."""
    flat = " ".join(text.split())
    flat = "".join(c if c.isprintable() else "?" for c in flat)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _text(holder: dict[str, Any], key: str) -> str:
    value = holder.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ContractError(f"request.{key} is not a string")
    return value


def _triple(request: dict[str, Any], key: str, last: str) -> tuple[str, str, str]:
    value = request.get(key)
    if not isinstance(value, dict):
        return ("", "", "")
    group, version, name = (value.get(part) for part in ("group", "version", last))
    return (str(group or ""), str(version or ""), str(name or ""))


def parse(body: bytes | bytearray) -> Review:
    """The request in `body`. Raises ContractError where it is not an AdmissionReview v1 with a uid."""
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ContractError("the body is not JSON") from error
    if not isinstance(review, dict) or review.get("kind") != KIND:
        raise ContractError(f"the body is not an {KIND}")
    if review.get("apiVersion") != API_VERSION:
        raise ContractError(f"only {API_VERSION} is served: set admissionReviewVersions to [v1]")
    request = review.get("request")
    if not isinstance(request, dict):
        raise ContractError("the review has no request")
    uid = _text(request, "uid")
    if not uid:
        raise ContractError("the request has no uid")
    pod = request.get("object")
    result = Review(
        uid=uid,
        operation=_text(request, "operation"),
        resource=_triple(request, "resource", "resource"),
        kind=_triple(request, "kind", "kind"),
        subresource=_text(request, "subResource"),
        namespace=_text(request, "namespace"),
        name=_text(request, "name"),
        dry_run=request.get("dryRun") is True,
        pod=pod if isinstance(pod, dict) else {},
    )
    if result.concerns_us and not isinstance(pod, dict):
        raise ContractError("the request has no object")
    return result


def _warnings(texts: Iterable[str]) -> list[str]:
    """One line each, no repetition, within the API's bounds; what does not fit is left out."""
    kept: dict[str, None] = {}
    total = 0
    for text in texts:
        line = one_line(text, MAX_WARNING)
        if line and line not in kept and total + len(line) <= MAX_WARNINGS:
            kept[line] = None
            total += len(line)
    return list(kept)


def _answer(uid: str, allowed: bool, warnings: Iterable[str], more: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": allowed, **more}
    lines = _warnings(warnings)
    if lines:
        response["warnings"] = lines
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def allow(
    uid: str, patch: list[dict[str, Any]] | None = None, warnings: Iterable[str] = ()
) -> dict[str, Any]:
    """Lets the pod in, with `patch` (RFC 6902 operations) where there is one."""
    if not patch:
        return _answer(uid, True, warnings, {})
    encoded = base64.b64encode(json.dumps(patch, separators=(",", ":")).encode()).decode()
    return _answer(uid, True, warnings, {"patchType": "JSONPatch", "patch": encoded})


def deny(uid: str, message: str, code: int = 403, warnings: Iterable[str] = ()) -> dict[str, Any]:
    """Keeps the pod out; the user reads `message` (one line) after the API server's own words."""
    reason = "Forbidden" if code == 403 else "Invalid"
    status = {"code": code, "reason": reason, "message": one_line(message, 1024)}
    return _answer(uid, False, warnings, {"status": status})
