"""Properties of the rule on generated pods, alone and in turns with KAI's admission."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kaimodel import PREFIX_KEY, Json, RefusedError, kai, target_of, us

from isolator import names
from isolator.errors import ContractError
from isolator.webhook import items
from isolator.webhook.patch import build_patch
from isolator.webhook.pod import read_pod
from isolator.webhook.rule import Rule, decide

RULES = st.builds(
    Rule,
    mount=st.sampled_from([names.DEFAULT_VGPU_MOUNT, "/var/lib/vgpu", "/opt/a/b"]),
    pod_opt_out=st.booleans(),
)
MANY = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PREFIX = "p-shared-gpu"
UID = items.POD_UID_SOURCE

TEXT = st.sampled_from(["", "1", "80g", "all", "$(POD_UID)", "ü\n", "~1/~0"])
ENV_NAMES = st.sampled_from(
    [
        *("A", "PATH", "LD_PRELOAD", "POD_UID", "CONTAINER_NAME", "CONTAINER_VGPU_MOUNT", "ISOLATOR_POD_UID"),
        *(
            "ISOLATOR_ENFORCE",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE",
            "CUDA_DEVICE_MEMORY_LIMIT_0",
            *names.KAI_ENV,
        ),
    ]
)
REFERENCE = st.builds(
    lambda name, key: {"configMapKeyRef": {"name": name, "key": key}},
    st.sampled_from(["mine", f"{PREFIX}-0", f"{PREFIX}-i0", f"{PREFIX}-12", PREFIX]),
    st.sampled_from([*names.KAI_ENV, "other"]),
)
ENV = st.one_of(
    st.builds(lambda name, value: {"name": name, "value": value}, ENV_NAMES, TEXT),
    st.builds(lambda name, source: {"name": name, "valueFrom": source}, ENV_NAMES, REFERENCE | st.just(UID)),
    st.builds(lambda name: {"name": name}, ENV_NAMES),
)
MOUNT = st.builds(
    lambda name, path, more: {"name": name, "mountPath": path, **more},
    st.sampled_from(["mine", "data", *names.VOLUMES]),
    st.sampled_from(["/data", "/usr/local", "/tmp/vgpulock", "/tmp", "x/y"]),
    st.sampled_from([{}, {"readOnly": True}, {"subPath": "a"}, {"subPathExpr": "$(POD_UID)"}]),
)
VOLUME = st.builds(
    lambda name, source: {"name": name, **source},
    st.sampled_from(["mine", "data", *names.VOLUMES]),
    st.sampled_from([{"emptyDir": {}}, {"hostPath": {"path": "/"}}, {"configMap": {"name": "x"}}]),
)


def lists(of: st.SearchStrategy[Json], size: int = 4) -> st.SearchStrategy[Any]:
    """A list, an empty one, null; an absent one is `...`."""
    return st.lists(of, max_size=size) | st.sampled_from([None, ...])


def members(**strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """An object without the members that came out as `...`."""
    return st.fixed_dictionaries(strategies).map(lambda o: {k: v for k, v in o.items() if v is not ...})


@st.composite
def pods(draw: st.DrawFn) -> Json:
    """A fraction pod for KAI: valid enough for KAI's admission, hostile otherwise."""
    labels = draw(
        st.lists(st.sampled_from([f"c-{i}" for i in range(12)]), min_size=1, max_size=6, unique=True)
    )
    inits = draw(st.integers(0, len(labels) - 1))
    made = [
        {"name": n, **draw(members(env=lists(ENV, 5), volumeMounts=lists(MOUNT), image=st.just("i")))}
        for n in labels
    ]
    annotations = draw(
        st.fixed_dictionaries(
            {"gpu-memory": st.sampled_from(["4096", "4096Mi", ""])},
            optional={
                "gpu-fraction-container-name": st.sampled_from(labels),
                PREFIX_KEY: st.just(PREFIX),
                names.ANNOTATION_STATUS: TEXT,
                "a/b~c": TEXT,
            },
        )
    )
    volumes: Json = draw(members(volumes=lists(VOLUME)))
    spec = {"schedulerName": "kai-scheduler", "containers": made[inits:], **volumes}
    if inits or draw(st.booleans()):
        spec["initContainers"] = made[:inits]
    return {"metadata": {"name": "n", "annotations": annotations}, "spec": spec}


def foreign(pod: Json, target: tuple[bool, int] | None) -> Json:
    """The pod without anything that is ours: volumes, mounts of them, variables, the status."""
    pod = copy.deepcopy(pod)
    pod["metadata"]["annotations"].pop(names.ANNOTATION_STATUS, None)
    spec = pod["spec"]
    spec["volumes"] = [v for v in spec.get("volumes") or [] if v["name"] not in names.VOLUMES]
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            mounts = container.get("volumeMounts") or []
            container["volumeMounts"] = [m for m in mounts if m["name"] not in names.VOLUMES]
            env = container.get("env") or []
            if (kind == "initContainers", index) == target:
                always = ("ISOLATOR_POD_UID", "CUDA_DEVICE_MEMORY_SHARED_CACHE")
                env = [e for e in env if e["name"] not in always]
            container["env"] = env
    return pod


def injected(pod: Json, rule: Rule) -> Json:
    """The pod after an injection; other verdicts are not what the property is about."""
    after, verdict = us(pod, rule)
    assume(verdict.action == "inject")
    return after


def after_kai(pod: Json, **mode: bool) -> Json:
    try:
        return kai(pod, **mode)
    except RefusedError:
        assume(False)
        raise


@MANY
@given(pods(), RULES, st.sampled_from([None, True, False]))
def test_frame_and_completeness(pod: Json, rule: Rule, hamicore: bool | None) -> None:
    """All of ours is there once and exact; all else is as it was, in the same order."""
    pod = pod if hamicore is None else after_kai(pod, hamicore=hamicore)
    after, verdict = us(pod, rule)
    assume(verdict.action == "inject" and verdict.target is not None)
    assert verdict.target is not None
    where = (verdict.target.init, verdict.target.index)
    target = target_of(after, verdict)
    before, now = foreign(pod, where), foreign(after, where)
    old, new = target_of(before, verdict).pop("env"), target_of(now, verdict).pop("env")
    assert old == new[: len(old)]
    absent = [
        e for e in items.default_env(rule.mount, target["name"]) if e["name"] not in {o["name"] for o in old}
    ]
    assert absent == new[len(old) :]
    for container, raw in zip(read_pod(pod).containers, read_pod(before).containers, strict=True):
        if (container.init, container.index) != where:  # a forged block of ours goes, nothing else
            raw.raw["env"] = [
                e for i, e in enumerate(raw.env) if i not in items.own_env(container, rule.mount)
            ]
    assert before == now
    lock = "/tmp/vgpulock" not in [m["mountPath"] for m in target_of(before, verdict)["volumeMounts"]]
    ours = [m for m in target["volumeMounts"] if m["name"] in names.VOLUMES]
    assert sorted(map(repr, items.mounts(rule.mount, target["name"], lock))) == sorted(map(repr, ours))
    volumes = [v for v in after["spec"]["volumes"] if v["name"] in names.VOLUMES]
    wanted = items.volumes(rule.mount, verdict.limit_configmap, lock)
    assert sorted(map(repr, wanted)) == sorted(map(repr, volumes))
    for entry in items.required_env(rule.mount):
        assert [entry] == [e for e in target["env"] if e["name"] == entry["name"]]


@MANY
@given(pods(), RULES, st.sampled_from([None, True, False]))
def test_second_call_changes_nothing(pod: Json, rule: Rule, hamicore: bool | None) -> None:
    """A patched pod gets an empty patch, whatever came before (B133)."""
    once = injected(pod if hamicore is None else after_kai(pod, hamicore=hamicore), rule)
    assert build_patch(once, decide(once, "team", rule), rule) == []


def ours_of(pod: Json) -> list[str]:
    """Everything of ours on the pod, as a sorted list."""
    spec = pod["spec"]
    found = [("volume", v) for v in spec["volumes"] if v["name"] in names.VOLUMES]
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        found += [
            (container["name"], m) for m in container.get("volumeMounts") or [] if m["name"] in names.VOLUMES
        ]
        env = container.get("env") or []
        found += [(container["name"], e) for e in env if e["name"] not in names.KAI_ENV]
    return sorted(map(repr, found))


@MANY
@given(pods(), RULES, st.booleans(), st.booleans())
def test_order_of_calls_does_not_matter(pod: Json, rule: Rule, hamicore: bool, nri: bool) -> None:
    """us-KAI-us, KAI-us, us-us-KAI-us and us-KAI-us-KAI give the same; KAI's next call changes nothing."""
    mode = {"hamicore": hamicore, "nri": nri}
    usual = injected(after_kai(injected(pod, rule), **mode), rule)
    assert after_kai(usual, **mode) == usual
    late = injected(after_kai(pod, **mode), rule)
    twice = injected(after_kai(injected(injected(pod, rule), rule), **mode), rule)
    again = injected(after_kai(late, **mode), rule)
    assert ours_of(usual) == ours_of(late) == ours_of(twice) == ours_of(again)
    assert us(usual, rule)[1].target == us(late, rule)[1].target


@MANY
@given(pods(), st.booleans())
def test_release_restores(pod: Json, marks: bool) -> None:
    """What the first pass put in comes out again; what had a name of ours is gone."""
    rule = Rule(on_no_limit="release")
    assume(not any({"name": "ISOLATOR_POD_UID", "valueFrom": UID} in c.env for c in read_pod(pod).containers))
    first, verdict = us(pod, rule)
    assume(verdict.action == "inject" and verdict.target is not None)
    assert verdict.target is not None
    after, second = us(after_kai(first, hamicore=False, marks=marks), rule)
    assume(second.action == "release")
    where = (verdict.target.init, verdict.target.index)
    expected = foreign(after_kai(foreign(pod, where), hamicore=False, marks=marks), where)
    assert foreign(after, where) == expected
    assert not [v for v in after["spec"].get("volumes") or [] if v["name"] in names.VOLUMES]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "value", "env"]), inner)
    ),
    max_leaves=6,
)


@MANY
@given(pods(), st.data())
def test_junk_gives_one_line(pod: Json, data: st.DataObject) -> None:
    """Any value anywhere in the pod ends in a verdict or in ContractError with one line."""
    pod["spec"]["containers"][0].update(envFrom=[{"configMapRef": {"name": "x"}}], securityContext={})
    node: Any = pod
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.integers(0, 3)) == 0:
            break
        node = node[key]
    node[key] = data.draw(JUNK)
    try:
        verdict = us(pod)[1]
    except ContractError as error:
        assert "\n" not in str(error) and len(str(error)) < 250
    else:
        assert not any("\n" in line for line in (*verdict.warnings, verdict.message))
