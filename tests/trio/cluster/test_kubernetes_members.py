"""The platform of Kubernetes: members as Deployments, by an API server that this machine runs."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5.errors import PlatformError
from celery5.logs.log import NullLog
from celery5.protocol.cluster.description import Cluster, Group, build_members
from celery5.protocol.cluster.manifests import CONTROLLER_RULES
from celery5.protocol.cluster.members import Beat, Ended, Member, MemberEvent, Ready, State, Stopping, Unknown
from celery5.protocol.cluster.pods import get_deployment_name, get_selector
from celery5.services.controller import kubernetes_api, kubernetes_members
from celery5.services.controller.kubernetes_api import ClusterAccess, KubernetesApi, WatchExpired
from celery5.services.controller.kubernetes_members import KubernetesMembers
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from tests.trio.cluster.kubernetes_there import NAMESPACE, Kubernetes, Manifest, Refused, kubernetes
from tests.trio.health.test_status_port import free_port

(MEMBER,) = build_members(Cluster(groups=(Group(kind="worker"),)))
NAME = MEMBER.name
DEPLOYMENT = get_deployment_name("shop", NAME)
TEMPLATE: Manifest = {
    "apiVersion": "v1",
    "kind": "PodTemplate",
    "metadata": {"name": "shop"},
    "template": {
        "metadata": {"labels": {"team": "web"}},
        "spec": {
            "containers": [
                {"name": "celery5", "image": "registry/shop:1", "env": [{"name": "A", "value": "1"}]}
            ]
        },
    },
}


@dataclass
class Scene:
    """A platform, the cluster that it talks to, and what it has reported."""

    platform: KubernetesMembers
    cluster: Kubernetes
    events: list[MemberEvent] = field(default_factory=list[MemberEvent])

    async def until(self, holds: Callable[[], object]) -> None:
        with trio.fail_after(20):
            while not holds():
                await trio.sleep(0.005)

    async def heard(self, *events: MemberEvent) -> None:
        """Wait until it has reported just these, heartbeats aside; then forget them."""

        def rest() -> list[MemberEvent]:
            return [event for event in self.events if not isinstance(event, Beat)]

        await self.until(lambda: len(rest()) >= len(events))
        assert rest() == list(events)
        self.events.clear()

    async def heard_of(self, kind: type[MemberEvent], text: str = "") -> None:
        """Wait until it has reported an event of this kind."""
        await self.until(lambda: any(isinstance(event, kind) and text in str(event) for event in self.events))

    @property
    def pod(self) -> str:
        """The name of the only pod."""
        (pod,) = self.cluster.pods()
        return str(pod["metadata"]["name"])

    async def start(self, member: Member = MEMBER) -> str:
        """Start a member, and report its pod ready."""
        await self.platform.start(member)
        self.cluster.report_ready(self.pod)
        await self.heard(Ready(member.name))
        return self.pod


def write_kubeconfig(folder: Path, cluster: Kubernetes) -> Path:
    (folder / "token").write_text(cluster.token)
    config = folder / "config"
    config.write_text(
        f"""
        current-context: here
        contexts: [{{name: here, context: {{cluster: c, user: u, namespace: {NAMESPACE}}}}}]
        clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{cluster.port}"}}}}]
        users: [{{name: u, user: {{tokenFile: token}}}}]
        """
    )
    return config


@asynccontextmanager
async def platform_on(cluster: Kubernetes, folder: Path, *, hung_after: float = 0.5) -> AsyncGenerator[Scene]:
    environ = {"KUBECONFIG": str(write_kubeconfig(folder, cluster))}
    platform = KubernetesMembers(cluster=Cluster(hung_after=hung_after), app="shop", environ=environ)
    scene = Scene(platform, cluster)
    async with trio.open_nursery() as nursery:
        await nursery.start(platform.live, scene.events.append)
        await scene.until(lambda: cluster.watches)
        try:
            yield scene
        finally:
            nursery.cancel_scope.cancel()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries wait for a moment only."""
    monkeypatch.setattr(kubernetes_api, "MAX_DELAY", 0.02)
    monkeypatch.setattr(kubernetes_members, "MAX_RECONNECT_DELAY", 0.02)


@asynccontextmanager
async def scene_in(folder: Path, **options: float) -> AsyncGenerator[Scene]:
    async with kubernetes() as cluster:
        cluster.create("podtemplates", TEMPLATE)
        async with platform_on(cluster, folder, **options) as scene:
            yield scene


async def test_a_member_is_a_deployment_of_one_pod_from_the_template(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.start()
        deployment = scene.cluster.deployment(DEPLOYMENT)
        assert deployment["spec"]["replicas"] == 1
        pod = deployment["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "registry/shop:1"
        assert container["command"][:5] == ["celery5", "worker", "start", "--name", NAME]
        assert {"name": "A", "value": "1"} in container["env"]
        assert pod["metadata"]["labels"]["team"] == "web"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 30 + 50 + 15
        await scene.heard_of(Beat)


async def test_a_stop_takes_the_replica_away_and_gives_the_pod_its_time(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        await scene.platform.stop(NAME)
        await scene.heard(Stopping(NAME))
        assert scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 0
        metadata = scene.cluster.objects["pods", pod]["metadata"]
        assert metadata["deletionGracePeriodSeconds"] == 95, "less would cut off a running job"
        scene.cluster.report_gone(pod)
        await scene.heard(Ended(NAME, "ended with exit code 0", 0))
        await scene.start()


async def test_a_kill_deletes_the_pod_and_its_end_is_reported_once_it_is_gone(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        await scene.platform.kill(NAME)
        await scene.heard_of(Stopping)
        assert scene.cluster.objects["pods", pod]["metadata"]["deletionGracePeriodSeconds"] == 1
        assert not [event for event in scene.events if isinstance(event, Ended)]
        scene.cluster.report_gone(pod, 137)
        await scene.heard_of(Ended, "code=-9")
        assert scene.cluster.pods() == [], "Kubernetes does not start it again: the Foreman does"


async def test_a_process_that_ends_by_itself_waits_for_the_foreman(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        scene.cluster.report_restart(pod, 3)
        await scene.until(lambda: scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 0)
        scene.cluster.report_gone(pod, 0)
        await scene.heard_of(Ended)
        assert scene.events[-1] == Ended(NAME, "ended with exit code 3", 3), "not as its successor ended"


async def test_a_controller_that_does_not_lead_changes_nothing(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.platform.fence(lambda: False)
        pod = await scene.start()
        scene.cluster.report_restart(pod, 3)
        await scene.heard_of(Stopping)
        await trio.sleep(0.3)  # three reports of its state
        assert scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 1


async def test_a_member_that_is_started_while_its_old_pod_ends_is_not_ready_yet(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.start()
        await scene.platform.stop(NAME)
        await scene.heard(Stopping(NAME))
        await scene.platform.start(MEMBER)
        assert Ready(NAME) not in scene.events


async def test_a_pod_that_waits_after_its_process_ended_is_not_excused(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.platform.fence(lambda: False)
        pod = await scene.start()
        scene.cluster.report_restart(pod, 3)
        await scene.heard(Stopping(NAME))
        await trio.sleep(0.3)  # three reports of its state
        assert not [event for event in scene.events if isinstance(event, Unknown)]


async def test_a_process_that_ends_twice_is_reported_once_with_its_first_end(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.platform.fence(lambda: False)
        pod = await scene.start()
        scene.cluster.report_restart(pod, 3)
        scene.cluster.report_restart(pod, 7, restarts=2)
        scene.cluster.report_gone(pod, 0)
        await scene.heard(Stopping(NAME), Ended(NAME, "ended with exit code 3", 3))


async def test_an_end_that_another_controller_has_settled_is_forgotten(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.platform.fence(lambda: False)
        pod = await scene.start()
        scene.cluster.report_restart(pod, 3)
        await scene.heard_of(Stopping)
        scene.cluster.report_ready(pod, restarts=1)
        assert await scene.platform.living() == {NAME: "up"}
        scene.platform.fence(lambda: True)
        await trio.sleep(0.3)  # three reports of its state
        assert scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 1


@pytest.mark.parametrize("replicas", [0, 1])
async def test_the_next_controller_finds_the_members(tmp_path: Path, replicas: int) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        if not replicas:
            await scene.platform.stop(NAME)
        async with platform_on(scene.cluster, tmp_path) as successor:
            states: dict[str, State] = {NAME: "up" if replicas else "stopping"}
            assert await successor.platform.living() == states
            await successor.platform.stop(NAME)
            successor.cluster.report_gone(pod)
            await successor.heard_of(Ended)
            assert await successor.platform.living() == {}
    assert scene.platform.outlives(NAME)
    assert scene.platform.stays(NAME)


async def test_a_changed_object_is_read_again_and_changed(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        await scene.platform.stop(NAME)
        scene.cluster.report_gone(pod)
        conflicts = iter(range(3))

        def change_too(name: str) -> None:
            if next(conflicts, None) is not None:
                scene.cluster.store("MODIFIED", "deployments", scene.cluster.deployment(name))

        scene.cluster.before_put = change_too
        await scene.platform.start(MEMBER)
        assert scene.cluster.requests.count(("PUT", f"deployments/{DEPLOYMENT}")) == 4
        assert scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 1
        scene.cluster.before_put = lambda name: scene.cluster.store(
            "MODIFIED", "deployments", scene.cluster.deployment(name)
        )
        with pytest.raises(PlatformError, match="409"):
            await scene.platform.start(MEMBER)


async def test_busy_and_failing_servers_are_asked_again(tmp_path: Path, quick: None) -> None:
    async with scene_in(tmp_path) as scene:
        busy = Refused(429, "TooManyRequests", headers={"Retry-After": "1"})
        scene.cluster.faults.extend([busy, None, Refused(503, "ServiceUnavailable")])
        await scene.start()
        scene.cluster.faults.extend([Refused(500, "InternalError")] * kubernetes_api.ATTEMPTS)
        with pytest.raises(PlatformError, match="does not answer: 500 InternalError"):
            await scene.platform.stop(NAME)
        await scene.platform.stop(NAME)


async def test_the_wait_that_a_server_asks_for_is_kept(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.cluster.faults.append(Refused(429, "TooManyRequests", headers={"Retry-After": "1"}))
        began = trio.current_time()
        await scene.platform.start(MEMBER)
        assert trio.current_time() - began >= 1


async def test_a_replaced_token_is_read_again(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.start()
        scene.cluster.token = "token-2"
        with pytest.raises(PlatformError, match="401"):
            await scene.platform.stop(NAME)
        (tmp_path / "token").write_text("token-2\n")
        await scene.platform.stop(NAME)


async def test_a_token_that_is_replaced_before_a_request_arrives_is_read_again(
    tmp_path: Path, quick: None
) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.start()
        scene.cluster.faults.append(Refused(401, "Unauthorized"))
        await scene.platform.stop(NAME)


@pytest.mark.parametrize("how", ["forgotten", "cut", "both"])
async def test_no_change_is_missed_when_a_watch_breaks(tmp_path: Path, quick: None, how: str) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        scene.cluster.is_up = how == "forgotten"
        await scene.platform.stop(NAME) if how == "forgotten" else scene.cluster.remove_pod(pod)
        await scene.until(lambda: scene.events)
        scene.events.clear()
        if how != "forgotten":
            scene.cluster.cut()
            await scene.heard_of(Unknown, "does not answer")
            scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] = 0
        scene.cluster.report_gone(pod)
        if how != "cut":
            scene.cluster.forget()
        scene.cluster.is_up = True
        await scene.heard_of(Ended)
        assert len([event for event in scene.events if isinstance(event, Ended)]) == 1


@pytest.mark.parametrize("how", ["an event of the watch", "the answer to it"])
async def test_a_watch_from_a_forgotten_version_has_expired(how: str) -> None:
    async with kubernetes() as cluster:
        if how == "the answer to it":
            cluster.faults.append(Refused(410, "Expired"))
        cluster.create("podtemplates", TEMPLATE)
        cluster.forget()
        access = ClusterAccess(
            server=f"http://127.0.0.1:{cluster.port}", namespace=NAMESPACE, token=cluster.token
        )
        api = KubernetesApi(access)
        with pytest.raises(WatchExpired):
            await api.watch(
                kubernetes_members.PODS,
                selector=get_selector("shop"),
                version="1",
                on_event=lambda kind, item: None,
            )
        await api.aclose()


async def test_pods_are_listed_again_at_once_when_a_watch_has_expired(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        scene.cluster.requests.clear()
        scene.cluster.report(pod, podIP="127.0.0.1")
        scene.cluster.forget()
        await scene.until(lambda: ("GET", "pods?watch") in scene.cluster.requests)
        assert scene.cluster.requests[:2] == [("GET", "pods"), ("GET", "pods?watch")]


async def test_while_the_api_is_unreachable_no_member_counts_as_dead(tmp_path: Path, quick: None) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.start()
        scene.cluster.is_up = False
        scene.cluster.cut()
        await scene.heard_of(Unknown, "does not answer")
        assert not [event for event in scene.events if isinstance(event, Ended)]
        scene.cluster.is_up = True
        scene.events.clear()
        await scene.heard_of(Beat)


async def test_a_pod_without_a_node_or_an_image_says_why_and_is_not_late(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        await scene.platform.start(MEMBER)
        unscheduled = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes",
        }
        scene.cluster.report(scene.pod, conditions=[unscheduled])
        await scene.heard_of(Unknown, "Unschedulable: 0/3 nodes")
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        status = {"name": "celery5", "restartCount": 0, "state": waiting}
        scene.cluster.report(scene.pod, conditions=[], containerStatuses=[status])
        await scene.heard_of(Unknown, "ImagePullBackOff: no such image")


async def test_a_pod_on_a_lost_node_is_followed_until_its_successor_is_ready(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        lost = await scene.start()
        scene.cluster.report(lost, reason="NodeLost", conditions=[])
        await scene.heard_of(Unknown, "its node ? does not answer")
        scene.cluster.remove_pod(lost)
        scene.cluster.reconcile(DEPLOYMENT)
        (successor,) = [
            pod["metadata"]["name"] for pod in scene.cluster.pods() if pod["metadata"]["name"] != lost
        ]
        assert not [event for event in scene.events if isinstance(event, Ended)]
        scene.cluster.report_ready(successor)
        await scene.heard_of(Ended)
        await scene.until(lambda: scene.events[-1] in (Ready(NAME), Beat(NAME)))


async def test_without_a_template_a_start_fails_in_one_line(tmp_path: Path) -> None:
    async with kubernetes() as cluster, platform_on(cluster, tmp_path) as scene:
        with pytest.raises(PlatformError) as caught:
            await scene.platform.start(MEMBER)
        assert "no PodTemplate shop-worker-default or shop: celery5 kubernetes manifests" in str(caught.value)
        cluster.create("podtemplates", {**TEMPLATE, "metadata": {"name": "shop-worker-default"}})
        await scene.start()


async def test_a_member_that_got_no_pod_ends_when_it_is_stopped(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.cluster.reconcile = lambda name: None  # type: ignore[method-assign]
        await scene.platform.start(MEMBER)
        await scene.platform.kill(NAME)
        await scene.heard(Ended(NAME, "Kubernetes had made no pod for it"))


async def test_deployments_of_members_that_are_not_started_again_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        await scene.platform.stop(NAME)
        scene.cluster.report_gone(pod)
        await scene.heard_of(Ended)
        monkeypatch.setattr(kubernetes_members, "SWEEP_DELAY", 0.2)
        await scene.until(lambda: ("deployments", DEPLOYMENT) not in scene.cluster.objects)
        scene.events.clear()
        await scene.start()
        await trio.sleep(0.5)  # as long as the sweep needed
        assert scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] == 1


@pytest.mark.parametrize("why", ["it does not lead", "a pod is still to be made"])
async def test_a_deployment_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    async with scene_in(tmp_path) as scene:
        if why == "it does not lead":
            scene.platform.fence(lambda: False)
        scene.cluster.reconcile = lambda name: None  # type: ignore[method-assign]
        await scene.platform.start(MEMBER)
        if why == "it does not lead":
            scene.cluster.deployment(DEPLOYMENT)["spec"]["replicas"] = 0
        monkeypatch.setattr(kubernetes_members, "SWEEP_DELAY", 0)
        await trio.sleep(0.3)  # three looks at its Deployment
        assert ("deployments", DEPLOYMENT) in scene.cluster.objects


async def test_a_reload_says_what_to_do_instead(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        with pytest.raises(PlatformError, match="no SIGHUP: celery5 worker reload"):
            await scene.platform.reload(NAME)


async def test_only_the_first_connection_ends_a_controller(tmp_path: Path, quick: None) -> None:
    async with kubernetes() as cluster:
        cluster.is_up = False
        config = write_kubeconfig(tmp_path, cluster)
        platform = KubernetesMembers(cluster=Cluster(), app="shop", environ={"KUBECONFIG": str(config)})
        with pytest.raises(PlatformError, match="does not answer"):
            await platform.live(lambda event: None)


async def test_a_pod_has_the_access_of_its_service_account(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=r"no access: .*; run the Controller in a pod"):
        kubernetes_api.find_access({"HOME": str(tmp_path)})
    for name, text in {"namespace": "web\n", "token": "t1\n", "ca.crt": "PEM"}.items():
        (tmp_path / name).write_text(text)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    access = kubernetes_api.find_access(environ, tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:6443", "web")
    assert access.read_token() == "t1"
    (tmp_path / "token").write_text("t2")
    assert access.read_token() == "t2"
    with pytest.raises(PlatformError, match="a certificate of the access cannot be read"):
        access.make_tls()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", "is no kubeconfig"),
        ("{", "is no kubeconfig"),
        ("current-context: x", "is no kubeconfig: KeyError: 'x'"),
        (
            "{current-context: x, contexts: [{name: x, context: {cluster: c, user: u}}], "
            "clusters: [{name: c, cluster: {server: s}}], users: [{name: u, user: {exec: {command: aws}}}]}",
            "its user signs in by a program",
        ),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_said_in_one_line(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(PlatformError) as caught:
        kubernetes_api.find_access({"KUBECONFIG": str(tmp_path / "config")})
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_controller_needs_no_more_than_its_role(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        scene.cluster.rules = CONTROLLER_RULES
        pod = await scene.start()
        scene.cluster.cut()
        await scene.until(lambda: scene.cluster.watches)
        await scene.platform.kill(NAME)
        scene.cluster.report_gone(pod)
        await scene.heard_of(Ended)
        await scene.platform.start(MEMBER)
        assert await scene.platform.living() == {NAME: "starting"}
        scene.cluster.rules = ()
        with pytest.raises(PlatformError, match="Kubernetes refuses: 403 cannot get resource"):
            await scene.platform.start(MEMBER)


async def test_the_status_of_a_pod_is_read_at_its_readiness_probe(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_members, "STATUS_PERIOD", 0.05)
    number, process = free_port(), ProcessStatus()
    port = StatusPort(process_status=process, log=NullLog(), port=number, host="127.0.0.1")
    await nursery.start(port.run)
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        scene.cluster.objects["pods", pod]["spec"]["containers"][0]["ports"] = [
            {"name": "status", "containerPort": number}
        ]
        scene.cluster.report(pod, podIP="127.0.0.1")
        await scene.until(lambda: Beat(NAME, process.format_summary()) in scene.events)
    nursery.cancel_scope.cancel()


async def test_an_end_is_reported_once_however_soon_the_pod_is_gone(tmp_path: Path) -> None:
    async with scene_in(tmp_path) as scene:
        pod = await scene.start()
        answer = scene.cluster.answer

        def answer_late(method: str, *rest: Any) -> Manifest:
            answered = answer(method, *rest)
            if method == "PATCH" and ("pods", pod) in scene.cluster.objects:
                scene.cluster.report_gone(pod)
                raise Refused(503, "ServiceUnavailable", headers={"Retry-After": "1"})
            return answered

        scene.cluster.answer = answer_late  # type: ignore[method-assign,assignment]
        with trio.fail_after(20):
            await scene.platform.stop(NAME)
        await scene.heard_of(Ended)
        await scene.platform.living()
        assert len([event for event in scene.events if isinstance(event, Ended)]) == 1
