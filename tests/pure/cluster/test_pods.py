"""Pods: what a member is on Kubernetes, and what its pods say of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.cluster.manifests import KubernetesOptions, make_controller_manifests, make_manifests
from celery5.protocol.cluster.members import Member
from celery5.protocol.cluster.pods import (
    ContainerEnd,
    PodChange,
    PodStatus,
    build_deployment,
    get_changes,
    get_deployment_name,
    read_pod,
    to_name,
)
from tests.night import examples
from tests.pure.cluster.kubernetes_schemas import check_manifest

TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "celery5", "image": "shop:1"}]}}
NAMES = st.from_regex(r"[A-Za-z0-9_.]{1,40}(-[A-Za-z0-9_.]{1,40}){0,2}(@[a-z0-9]{1,20})?", fullmatch=True)


@given(st.text(), st.text())
def test_names_are_dns_labels_and_differ_where_texts_differ(one: str, other: str) -> None:
    names = [to_name(text) for text in (one, other)]
    for name in names:
        assert len(name) <= 46
        assert name.isascii()
        assert name == name.lower()
        assert name.replace("-", "a").isalnum()
        assert name[0].isalpha()
        assert name[-1] != "-"
    assert (names[0] == names[1]) is (one == other)


def test_a_usual_name_stays_as_it_is() -> None:
    assert get_deployment_name("shop", "worker-mail-2") == "shop-worker-mail-2"


@settings(max_examples=examples(25))
@given(
    NAMES,
    NAMES,
    st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,20}", fullmatch=True), st.text(max_size=20)),
)
def test_every_member_is_a_deployment_that_kubernetes_takes(
    app: str, name: str, environment: dict[str, str]
) -> None:
    member = Member(
        name=name, kind="worker", arguments=("worker", "start", "--name", name), environment=environment
    )
    deployment = build_deployment(app, member, TEMPLATE, hung_after=60, start_limit=90)
    check_manifest(deployment)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {variable["name"] for variable in container["env"]} == set(environment)
    assert "args" not in container


@settings(max_examples=examples(15), deadline=None)
@given(
    NAMES,
    st.lists(NAMES.filter(lambda name: "@" not in name), min_size=1, max_size=3, unique=True),
    st.integers(0, 3),
    st.integers(1, 50),
    st.sampled_from(["", "cpu", "keda"]),
)
def test_every_cluster_has_manifests_that_kubernetes_takes(
    app: str, groups: list[str], minimum: int, maximum: int, scaler: Any
) -> None:
    cluster = parse_cluster({"schedulers": {"a": {}}, "workers": {name: {"count": 2} for name in groups}})
    options = KubernetesOptions(
        target="shop",
        name=app,
        image="shop:1",
        scaler=scaler,
        minimum=minimum,
        maximum=maximum,
        dashboard="tokens",
    )
    for manifests in (make_manifests(cluster, options), make_controller_manifests(cluster, "", options)):
        for manifest in manifests:
            check_manifest(manifest)
        names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
        assert len(set(names)) == len(names)
        for manifest in manifests:
            if manifest["kind"] == "ScaledObject":
                spec = manifest["spec"]
                assert 0 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]


def pod(uid: str = "a", **options: Any) -> PodStatus:
    return PodStatus(uid=uid, name=f"pod-{uid}", member="m", **options)


UP = pod(is_ready=True)
CHANGES: dict[str, tuple[PodStatus | None, list[PodStatus], list[PodChange]]] = {
    "a new pod says nothing": (None, [pod()], []),
    "a pod gets ready": (pod(), [UP], [PodChange("ready")]),
    "a ready pod stays so": (UP, [UP], []),
    "a pod is to stop": (UP, [pod(is_terminating=True)], [PodChange("stopping")]),
    "a pod is gone": (
        pod(is_terminating=True, end=ContainerEnd("x", 0)),
        [],
        [PodChange("gone", ContainerEnd("x", 0))],
    ),
    "a container was started again": (
        UP,
        [pod(restarts=1, end=ContainerEnd("x", 3))],
        [PodChange("exited", ContainerEnd("x", 3))],
    ),
    "a container has ended": (
        UP,
        [pod(has_ended=True, end=ContainerEnd("x", 3))],
        [PodChange("exited", ContainerEnd("x", 3))],
    ),
    "an end is reported once": (pod(has_ended=True), [pod(has_ended=True)], []),
    "a successor waits for the end": (UP, [UP, pod("b")], []),
    "a ready successor of a lost pod is the member": (
        pod(lost_node="n1"),
        [pod(is_terminating=True), pod("b", is_ready=True)],
        [PodChange("gone", ContainerEnd("its pod was removed")), PodChange("ready")],
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_pods_are_changes_of_their_member(case: str) -> None:
    before, pods, changes = CHANGES[case]
    assert get_changes(before, {found.uid: found for found in pods})[1] == changes


def test_reasons_are_those_of_kubernetes() -> None:
    ended = {
        "containerStatuses": [
            {"name": "celery5", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
        ]
    }
    read = read_pod({"metadata": {"uid": "a", "name": "p"}, "status": ended})
    assert read.end is not None
    assert read.end.code == -9
    assert "OOMKilled" in read.end.how
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on\nmemory"}
    assert read_pod({"status": evicted}).end_reason.how == "Evicted: The node was low on memory"
    assert read_pod({}).state == "starting"
