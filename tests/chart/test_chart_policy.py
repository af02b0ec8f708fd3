"""The admission policy: off by default, for the pods of the webhook, with the names of the contract."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from charting import RELEASE, Helm, Object, Rendered

from isolator import mountpath, names
from isolator.webhook import items

ON = "webhook.admissionPolicy.enabled=true"
POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
INJECTED, DEBUG = f"{RELEASE}-injected", f"{RELEASE}-debug"


def spec(rendered: Rendered, name: str = INJECTED) -> Object:
    found: Object = rendered.one(POLICY, name)["spec"]
    return found


def webhook(rendered: Rendered) -> Object:
    found: Object = rendered.one("MutatingWebhookConfiguration")["webhooks"][0]
    return found


def conditions(found: Object) -> dict[str, str]:
    return {item["name"]: item["expression"] for item in found["matchConditions"]}


def variables(rendered: Rendered) -> dict[str, str]:
    return {item["name"]: item["expression"] for item in spec(rendered)["variables"]}


def test_off_by_default(render: Any) -> None:
    """A plain installation has no policy; one value renders both with a binding each that denies."""
    assert not render().all(POLICY) + render().all(BINDING)
    rendered = render(ON)
    assert rendered.names(POLICY) == rendered.names(BINDING) == {INJECTED, DEBUG}
    for name in (INJECTED, DEBUG):
        bound = rendered.one(BINDING, name)["spec"]
        assert bound == {"policyName": name, "validationActions": ["Deny"]}
        assert spec(rendered, name)["failurePolicy"] == "Fail"


@pytest.mark.parametrize(
    "more",
    [
        (),
        ('webhook.namespaceSelector={"matchLabels":{"a":"b"},"matchExpressions":[{"key":"c","operator":"Exists"}]}',),
        ('webhook.objectSelector={"matchLabels":{"a":"b"},"matchExpressions":[{"key":"c","operator":"Exists"}]}',),
        ("webhook.podOptOut=false",),
        ("webhook.podOptOut=false", 'webhook.objectSelector={"matchLabels":{"a":"b"}}'),
        ('webhook.schedulerNames=["a","b"]', 'webhook.matchConditions=[{"name":"x","expression":"true"}]'),
        ("webhook.schedulerNames=[]", 'namespaceOverride="elsewhere"'),
    ],
)  # fmt: skip
def test_judges_the_pods_of_the_webhook(render: Any, more: tuple[str, ...]) -> None:
    """Selectors and conditions are the webhook's, word by word, whatever the values say."""
    rendered = render(ON, *more)
    hook, policy = webhook(rendered), spec(rendered)
    match = policy["matchConstraints"]
    assert match["namespaceSelector"] == hook["namespaceSelector"]
    assert match.get("objectSelector") == hook.get("objectSelector")
    mine = conditions(policy)
    closed = "webhook.podOptOut=false" in more
    assert ("kai-resource-isolator.io/opt-out" in mine) != closed
    own = ("kai-resource-isolator.io/new", "kai-resource-isolator.io/opt-out")
    assert {name: text for name, text in mine.items() if name not in own} == conditions(hook)


def test_namespaces_that_the_webhook_never_touches(render: Any) -> None:
    """They stay out also where the values take them off the list."""
    (excluded, _) = spec(render(ON, 'webhook.excludedNamespaces=["mine"]'))["matchConstraints"][
        "namespaceSelector"
    ]["matchExpressions"]
    assert set(excluded["values"]) == {"mine", RELEASE, *names.UNTOUCHED_NAMESPACES}


def test_debug_containers_as_the_webhook(render: Any) -> None:
    """The second policy asks about the same pods as the webhook's second entry, by all names of ours."""
    rendered = render(ON)
    hook = rendered.one("MutatingWebhookConfiguration")["webhooks"][1]
    policy = spec(rendered, DEBUG)
    assert policy["matchConditions"] == hook["matchConditions"]
    assert policy["matchConstraints"] == {"resourceRules": hook["rules"]}
    text = json.dumps(policy)
    for name in (*names.VOLUMES, *names.KAI_ENV, names.ANNOTATION_CONFIGMAP):
        assert f"'{name}'" in text, name


def test_asks_for_each_item_of_the_injection(render: Any) -> None:
    """Volumes, mounts and the variable are those that the webhook adds, at the one path."""
    mount = "/var/lib/vgpu"
    text = variables(render(ON, f'paths.containerVgpuMount="{mount}"'))["missing"]
    for volume in items.volumes(mount, None, lock=False):
        assert f"v.name == '{volume['name']}'" in text
        if "hostPath" in volume:
            assert f"v.hostPath.path == '{volume['hostPath']['path']}'" in text
    for item in items.mounts(mount, "main", lock=False):
        assert f"m.name == '{item['name']}' && m.mountPath == '{item['mountPath']}'" in text
    assert f"m.subPathExpr == '$({names.ENV_ISOLATOR_POD_UID})_' + variables.name" in text
    assert f"m.subPath == '{names.ENV_MEMORY_LIMIT}'" in text
    assert names.DEFAULT_VGPU_MOUNT not in text


PATHS = """
/ // /. . ./ /etc /etc/ //etc/./ etc ./etc /etc/. /etc/ld.so.preload /etc//ld.so.preload/x etc/ld.so.preload
/etc/ld.so.preload.d /etc/ldxsoxpreload /etc/ld.so.conf.d /etcx /x/etc /data/etc/ld.so.preload /usr/local
/usr/local/ /opt/v+1.x /opt/v+1.x/ /opt/./v+1.x//limit opt/v+1.x/a /opt/v+1.x2 /opt/v+1-x /opt/vv1.x /opt
/x/opt/v+1.x /.. /etc/... /opt/v+1.x.d /a..b /a/.b /...
""".split()


def test_paths_that_hide_are_those_of_the_webhook(render: Any) -> None:
    """The expression finds the paths that the webhook's own rule finds, whatever letters are in the mount."""
    mount = "/opt/v+1.x"
    text = variables(render(ON, f'paths.containerVgpuMount="{mount}"'))["covers"]
    (pattern,) = re.findall(r"path\.matches\(r'(.*)'\)", text)
    for path in (*PATHS, f"{mount}/a\nb", f"{mount}\n"):
        assert bool(re.search(pattern.replace("$", r"\Z"), path)) == mountpath.hides(path, mount), repr(path)
    assert re.search(pattern, "/data/../data")  # not resolved: taken for the worst


GLOBS = ["gvisor", "kata*", "a?c", "x.y", "[ab]-*", "[!ab]-z", "v[0-9]", "a+b"]
CLASSES = [
    "gvisor",
    "gvisor2",
    "kata",
    "kata-qemu",
    "akata",
    "abc",
    "ac",
    "x.y",
    "xzy",
    "a-1",
    "c-z",
    "a-z",
    "v7",
    "vx",
    "aab",
]


def test_sandboxes_are_the_same_globs(render: Any) -> None:
    """The expression takes a runtime class for a sandbox where the webhook does."""
    text = variables(render(ON, f"webhook.sandboxRuntimeClasses={json.dumps(GLOBS)}"))["exempt"]
    (literal,) = re.findall(r"runtimeClassName\.matches\((\".*?\")\)", text)
    pattern = json.loads(literal)
    for name in CLASSES:
        assert bool(re.search(pattern, name)) == any(fnmatchcase(name, glob) for glob in GLOBS), name
    assert "runtimeClassName" not in variables(render(ON, "webhook.sandboxRuntimeClasses=[]"))["exempt"]


def test_opt_outs_and_released_pods(render: Any) -> None:
    """What the values close or open is closed or open here."""
    usual = variables(render(ON))
    assert f"'{names.ENV_DISABLE_CONTROL}'" in usual["switches"]
    assert "variables.switches" in usual["exempt"] and "variables.limited" not in usual["exempt"]
    closed = variables(render(ON, "webhook.podOptOut=false"))
    assert "switches" not in closed and "switches" not in closed["exempt"]
    assert "!variables.limited" in variables(render(ON, 'webhook.onNoLimit="release"'))["exempt"]
    assert "variables.limited" not in variables(render(ON, 'webhook.onNoLimit="deny"'))["exempt"]


def test_refusal_is_one_line_with_what_to_do(render: Any) -> None:
    """The sentence names the command that shows the webhook, and fits into an event."""
    rendered = render(ON, 'namespaceOverride="elsewhere"')
    (rule,) = spec(rendered)["validations"]
    assert rule["reason"] == "Forbidden"
    said = re.findall(r"'((?:[^'\\]|\\.)*)'", variables(rendered)["problem"])
    assert all("\n" not in part and len(part) < 300 for part in (*said, rule["message"]))
    assert any("kubectl -n elsewhere get pods" in part for part in said)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("validationActions={Deny,Warn}", "validationActions"),
        ("validationActions={}", "validationActions"),
        ("validationActions={Block}", "validationActions"),
        ("failurePolicy=Open", "failurePolicy"),
        ("enabld=true", "enabld"),
        ("validationActions=null", "validationActions"),
    ],
)
def test_bad_values_are_refused(each_helm: Helm, flag: str, line: str) -> None:
    """What the API server would refuse later is refused by the schema, by name."""
    done = each_helm.template("--set", f"webhook.admissionPolicy.{flag}", check=False)
    assert done.returncode and line in done.stderr
