"""Kubernetes: a platform that runs each member of a cluster as a Deployment of one replica.

A member is up when its pod is ready: the probes of Kubernetes find one that hangs, and end it. While a Controller
leads, it decides what is started again, as on every other platform: a member whose process has ended by itself has no
replica until the Foreman starts it. While none leads, Kubernetes starts it again. Members survive their Controller.
"""

import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import Beat, Ended, Member, MemberEvent, Ready, State, Stopping, Unknown
from celery5.protocol.cluster.pods import (
    ContainerEnd,
    Manifest,
    PodChange,
    PodStatus,
    build_deployment,
    get_changes,
    get_deployment_name,
    get_selector,
    list_template_names,
    read_member_name,
    read_pod,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.kubernetes_api import (
    MERGE_PATCH,
    KubernetesApi,
    KubernetesRefused,
    WatchExpired,
    find_access,
)

DEPLOYMENTS = "apps/v1/deployments"
PODS = "v1/pods"
TEMPLATES = "v1/podtemplates"
MAX_RECONNECT_DELAY = 5.0
"""The most seconds between two attempts to watch again."""
BEAT_CHECKS = 5
"""The number of reports of a member's state within the time after which it counts as hung."""
MAX_PERIOD = 5.0
"""The most seconds between two reports of a member's state."""
CONFLICT_ATTEMPTS = 5
"""Attempts to change an object that something else changes at the same time."""
STATUS_PERIOD = 5.0
"""The fewest seconds between two requests for the status of a member."""
STATUS_CONNECTIONS = 16
"""The most members that are asked for their status at the same time."""
SWEEP_DELAY = 60.0
"""Seconds from the end of a member to the removal of its Deployment, unless the member is started again."""


class _MemberPods:
    """The pods of one member, and what is known of it."""

    def __init__(self) -> None:
        self.pods: dict[str, PodStatus] = {}
        self.pod: PodStatus | None = None
        # How its process ended by itself: it is reported when its pod is gone.
        self.exit: ContainerEnd | None = None
        # It still has its replica, which is to be taken away.
        self.is_to_stop = False
        self.ended_at = trio.current_time()

    def replace_pods(self, pods: dict[str, PodStatus]) -> None:
        """Replace the pods of the member by these."""
        self.pods = pods

    def add_pod(self, pod: PodStatus) -> None:
        """Add a pod, or replace its former state."""
        self.pods[pod.uid] = pod

    def remove_pod(self, pod: PodStatus) -> None:
        """Forget a pod, whose last state has its exit code."""
        self.pods.pop(pod.uid, None)
        if self.pod is not None and self.pod.uid == pod.uid:
            self.pod = pod

    def update(self) -> list[PodChange]:
        """Return what has happened to the member since the last call."""
        self.pod, changes = get_changes(self.pod, self.pods)
        return changes

    def note_exit(self, end: ContainerEnd | None) -> bool:
        """Note that its process has ended by itself. Return False if that was noted before."""
        if self.exit is not None:
            return False
        self.exit, self.is_to_stop = end or ContainerEnd("its process ended"), True
        return True

    def note_end(self, end: ContainerEnd | None) -> ContainerEnd:
        """Note that its pod is gone; return how it ended."""
        found = self.exit or end or ContainerEnd("its pod was removed")
        self.exit, self.ended_at = None, trio.current_time()
        return found

    def forget_exit(self) -> None:
        """Forget that its process has ended by itself: that is settled."""
        self.exit, self.is_to_stop = None, False

    def note_stop(self) -> None:
        """Note that its replica was taken away."""
        self.is_to_stop = False

    def note_sweep(self) -> None:
        """Note that its Deployment was checked."""
        self.ended_at = trio.current_time()


class KubernetesMembers(Platform):
    """Runs members as Deployments in the namespace of this Controller.

    Args:
        environ: the environment that says how the API is reached.

    Raises:
        PlatformError: nothing says how the API is reached.
    """

    def __init__(self, *, cluster: Cluster, app: str, environ: Mapping[str, str] | None = None) -> None:
        self._cluster = cluster
        self._app = app
        self._selector = get_selector(app)
        self._access = find_access(os.environ if environ is None else environ)
        self._opened_api: KubernetesApi | None = None
        self._members: dict[str, _MemberPods] = {}
        self._report: Callable[[MemberEvent], None] = _ignore_event
        self._may_act: Callable[[], bool] = lambda: True
        self._problem = ""
        self._version = ""
        self._watching = trio.CancelScope()
        self._wakes = trio.Event()

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled. Members that still run then go on, for the next Controller.

        A lost connection is tried again; only the first one raises PlatformError.
        """
        self._report = report
        try:
            await self._list_pods()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._report_states)
                nursery.start_soon(self._report_statuses)
                nursery.start_soon(self._settle_members)
                task_status.started()
                await self._watch()
        finally:
            api, self._opened_api = self._opened_api, None
            if api is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await api.aclose()

    async def start(self, member: Member) -> None:
        """Create the member's Deployment, or give it its replica again, as it should be now. Raises PlatformError."""
        template = await self._find_template(member)
        deployment = build_deployment(
            self._app,
            member,
            template,
            hung_after=self._cluster.hung_after,
            start_limit=self._cluster.start_limit,
        )
        state = self._members.setdefault(member.name, _MemberPods())
        state.forget_exit()
        await self._put_deployment(deployment)
        if state.pod is not None and state.pod.is_ready and not state.pod.is_terminating:
            self._report(Ready(member.name))  # Kubernetes has started it again by itself

    async def stop(self, name: str) -> None:
        """Take the member's replica away: its pod gets SIGTERM, and the time that it needs. Raises PlatformError."""
        if (state := self._members.get(name)) is not None:
            state.note_stop()
            await self._scale_to_zero(name)

    async def kill(self, name: str) -> None:
        """Take the member's replica away, and delete its pods at once. Raises PlatformError."""
        state = self._members.get(name)
        if state is None:
            return
        await self._scale_to_zero(name)
        for pod in tuple(state.pods.values()):
            # One second, not none: with none the pod counts as gone while its process may still run.
            await self._delete(
                f"{PODS}/{pod.name}", {"gracePeriodSeconds": 1, "preconditions": {"uid": pod.uid}}
            )

    async def reload(self, name: str) -> None:
        """Raise PlatformError: pods get no SIGHUP."""
        raise PlatformError(f"{name}: a pod gets no SIGHUP: celery5 worker reload, or controller restart")

    async def living(self) -> Mapping[str, State]:
        """Return the members of this cluster that run. Raises PlatformError."""
        await self._list_pods()
        for state in self._members.values():
            state.forget_exit()  # another Controller led meanwhile
        listed = await self._api.call("GET", DEPLOYMENTS, query={"labelSelector": self._selector})
        states: dict[str, State] = {}
        for deployment in listed.get("items", ()):
            name = read_member_name(deployment)
            state = self._members.setdefault(name, _MemberPods())
            has_replica = deployment["spec"].get("replicas", 1) > 0
            if name and (has_replica or state.pods):
                pod_state: State = "starting" if state.pod is None else state.pod.state
                states[name] = pod_state if has_replica else "stopping"
        return states

    def outlives(self, _name: str) -> bool:
        """Return True: Deployments survive the Controller."""
        return True

    def stays(self, _name: str) -> bool:
        """Return True: a Controller's pod may be replaced at any time, and the next one goes on."""
        return True

    def fence(self, may_act: Callable[[], bool]) -> None:
        """Set a function that says whether this Controller leads. Only then are the ends of members acted on."""
        self._may_act = may_act

    @property
    def _api(self) -> KubernetesApi:
        if self._opened_api is None:
            self._opened_api = KubernetesApi(self._access)
        return self._opened_api

    async def _find_template(self, member: Member) -> Manifest:
        """Return the template of the PodTemplate for a member. Raises PlatformError."""
        names = list_template_names(self._app, member)
        for name in names:
            try:
                return dict((await self._api.call("GET", f"{TEMPLATES}/{name}"))["template"])
            except KubernetesRefused as error:
                if error.status != 404:
                    raise
        raise PlatformError(
            f"there is no PodTemplate {' or '.join(names)}: celery5 kubernetes manifests prints one"
        )

    async def _put_deployment(self, deployment: Manifest) -> None:
        """Create or replace a Deployment, whatever else changes it meanwhile. Raises PlatformError."""
        resource = f"{DEPLOYMENTS}/{deployment['metadata']['name']}"
        for attempts_left in reversed(range(CONFLICT_ATTEMPTS)):
            try:
                try:
                    current = await self._api.call("GET", resource)
                except KubernetesRefused as error:
                    if error.status != 404:
                        raise
                    await self._api.call("POST", DEPLOYMENTS, body=deployment)
                else:
                    version = current["metadata"]["resourceVersion"]
                    metadata = {**deployment["metadata"], "resourceVersion": version}
                    await self._api.call("PUT", resource, body={**deployment, "metadata": metadata})
                return
            except KubernetesRefused as error:
                # Created, changed or removed by something else since it was read.
                if error.status not in (404, 409) or not attempts_left:
                    raise

    async def _scale_to_zero(self, name: str) -> None:
        """Take a member's replica away, if it has a Deployment. Raises PlatformError."""
        resource = f"{DEPLOYMENTS}/{get_deployment_name(self._app, name)}"
        has_pods = bool(self._members[name].pods)
        try:
            await self._api.call("PATCH", resource, body={"spec": {"replicas": 0}}, content_type=MERGE_PATCH)
        except KubernetesRefused as error:
            if error.status != 404:
                raise
        if not has_pods:  # else the end of a pod is reported, or was meanwhile
            await self._list_pods()
            if not self._members[name].pods:
                self._report(Ended(name, "Kubernetes had made no pod for it"))

    async def _delete(self, resource: str, options: Manifest) -> None:
        """Delete an object if it still exists and was not replaced by another one. Raises PlatformError."""
        try:
            await self._api.call("DELETE", resource, body=options)
        except KubernetesRefused as error:
            if error.status not in (404, 409):
                raise

    async def _list_pods(self) -> None:
        """Read all pods, report what has changed, and watch from there. Raises PlatformError."""
        listed = await self._api.call("GET", PODS, query={"labelSelector": self._selector})
        found: dict[str, dict[str, PodStatus]] = {name: {} for name in self._members}
        for item in listed.get("items", ()):
            pod = read_pod(item)
            found.setdefault(pod.member, {})[pod.uid] = pod
        for name, pods in found.items():
            self._members.setdefault(name, _MemberPods()).replace_pods(pods)
            self._handle_pods(name)
        self._problem = ""
        self._version = str(listed["metadata"]["resourceVersion"])
        self._watching.cancel()

    async def _watch(self) -> None:
        """Watch pods until cancelled."""
        attempt = 0
        while True:
            try:
                if not self._version:  # changes may have been missed
                    await self._list_pods()
                with trio.CancelScope() as self._watching:
                    self._version = await self._api.watch(
                        PODS, selector=self._selector, version=self._version, on_event=self._handle_change
                    )
                attempt = 0
            except WatchExpired:
                self._version = ""
            except PlatformError as error:
                self._version, self._problem = "", str(error)
                attempt += 1
                await trio.sleep(
                    full_jitter(attempt, start=0.1, cap=MAX_RECONNECT_DELAY, random=random.random)
                )

    def _handle_change(self, kind: str, item: Mapping[str, Any]) -> None:
        """Handle one event of the watch. Must not wait."""
        self._problem = ""
        if kind not in ("ADDED", "MODIFIED", "DELETED"):
            return
        pod = read_pod(item)
        state = self._members.setdefault(pod.member, _MemberPods())
        if kind == "DELETED":
            state.remove_pod(pod)
        else:
            state.add_pod(pod)
        self._handle_pods(pod.member)

    def _handle_pods(self, name: str) -> None:
        """Report what the pods of a member say."""
        state = self._members[name]
        for change in state.update():
            match change.what:
                case "ready":
                    self._report(Ready(name))
                case "stopping":
                    self._report(Stopping(name))
                case "exited":
                    if state.note_exit(change.end):
                        self._report(Stopping(name))
                        self._wakes.set()
                case "gone":
                    end = state.note_end(change.end)
                    self._report(Ended(name, end.how, end.code))

    async def _report_states(self) -> None:
        """Report at intervals that members work, or that their state is unknown."""
        period = min(self._cluster.hung_after / BEAT_CHECKS or MAX_PERIOD, MAX_PERIOD)
        while True:
            await trio.sleep(period)
            for name, state in tuple(self._members.items()):
                pod = state.pod
                if self._problem:
                    self._report(Unknown(name, self._problem))
                elif pod is not None and pod.lost_node:
                    self._report(Unknown(name, f"its node {pod.lost_node} does not answer"))
                elif pod is not None and pod.waiting and not pod.restarts:
                    # It is not late: there is no node for it, or no image.
                    self._report(Unknown(name, pod.waiting))
                elif pod is not None and pod.state == "up":
                    self._report(Beat(name))
            self._wakes.set()

    async def _report_statuses(self) -> None:
        """Ask working members for their status in turn: it is shown, and canaries are compared by it."""
        while True:
            pause = trio.current_time() + STATUS_PERIOD
            members = [(name, state.pod) for name, state in self._members.items()]
            urls = {name: pod.readiness_url for name, pod in members if pod is not None and pod.state == "up"}
            places = trio.CapacityLimiter(STATUS_CONNECTIONS)

            async def ask(name: str, url: str, places: trio.CapacityLimiter) -> None:
                async with places:
                    if status := await self._api.read_status(url):
                        self._report(Beat(name, status))

            async with trio.open_nursery() as nursery:
                for name, url in urls.items():
                    if url:
                        nursery.start_soon(ask, name, url, places)
            await trio.sleep_until(pause)

    async def _settle_members(self) -> None:
        """Take the replica of members that have ended by themselves, and remove Deployments that are not used."""
        while True:
            await self._wakes.wait()
            self._wakes = trio.Event()
            for name, state in tuple(self._members.items()):
                try:
                    if state.is_to_stop and self._may_act():
                        await self._scale_to_zero(name)
                        state.note_stop()
                    elif (
                        not state.pods
                        and trio.current_time() >= state.ended_at + SWEEP_DELAY
                        and self._may_act()
                    ):
                        await self._sweep(name)
                except PlatformError:
                    break  # tried again with the next report

    async def _sweep(self, name: str) -> None:
        """Remove the Deployment of a member that does not run, unless it has a replica by now."""
        resource = f"{DEPLOYMENTS}/{get_deployment_name(self._app, name)}"
        self._members[name].note_sweep()
        try:
            deployment = await self._api.call("GET", resource)
        except KubernetesRefused as error:
            if error.status != 404:
                raise
        else:
            if deployment["spec"].get("replicas", 1) > 0:
                return
            version = deployment["metadata"]["resourceVersion"]
            await self._delete(
                resource, {"propagationPolicy": "Background", "preconditions": {"resourceVersion": version}}
            )
        if not self._members[name].pods:
            del self._members[name]


def _ignore_event(_event: MemberEvent) -> None:
    """Ignore an event: nothing listens yet."""
