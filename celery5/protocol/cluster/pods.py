"""Run members of a cluster on Kubernetes: make the objects of each, and read its state from its pods.

Each member is a Deployment of one replica, so it goes on, and is started again on another node, while no Controller is
there. A member that is asked to stop has no replica. What all members share, such as the image and the Secret with
the broker's URL, is in a PodTemplate, an ordinary object of the namespace.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from celery5.protocol.cluster.members import Member, State

Manifest = dict[str, Any]
"""An object of Kubernetes, as JSON has it."""

MANAGER = "celery5-controller"
"""The label `app.kubernetes.io/managed-by` of what a Controller makes."""
MANAGER_LABEL = "app.kubernetes.io/managed-by"
APP_LABEL = "celery5/app"
MEMBER_ANNOTATION = "celery5/member"
"""The name of the member, which may have characters that a label or the name of an object cannot have."""
STATUS_PORT = 9500
"""The port in a pod on which a process answers probes."""
KILL_MARGIN = 15
"""Seconds from a member's own stop timeout until Kubernetes kills its pod."""
CONTAINER = "celery5"
"""The name of the member's container in a PodTemplate. If there is none, the first container is used."""
MAX_NAME = 46
"""The most characters of a Deployment's name: names of pods have 17 more, and 63 are allowed."""
MAX_LABEL = 63
MAX_MESSAGE = 300
"""The most characters that are kept of a message of Kubernetes."""


def to_name(text: str, limit: int = MAX_NAME) -> str:
    """Return a name that Kubernetes takes (a DNS label); other texts never get the same one.

    A text that is not such a name, or too long, gets a hash at its end.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if name == text and len(name) <= limit and name[:1].isalpha():
        return name
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"{name if name[:1].isalpha() else 'x' + name}"[: limit - 9].rstrip("-") + f"-{digest}"


def get_deployment_name(app: str, member: str) -> str:
    """Return the name of a member's Deployment."""
    return to_name(f"{app}-{member}")


def get_selector(app: str) -> str:
    """Return the label selector of all members of an application's cluster."""
    return f"{MANAGER_LABEL}={MANAGER},{APP_LABEL}={to_name(app, MAX_LABEL)}"


def list_template_names(app: str, member: Member) -> tuple[str, str]:
    """Return the names of the PodTemplates that a member may have: that of its group, then that of all."""
    return to_name(f"{app}-{member.kind}-{member.group}"), to_name(app)


def make_probes(hung_after: float, start_limit: float) -> Manifest:
    """Return the three probes of a container. A member that hangs gets as much time as from a Foreman."""
    hung = math.ceil((hung_after or 60) / 10)
    return {
        "livenessProbe": _probe("/livez", period=10, failures=max(3, hung)),
        "readinessProbe": _probe("/readyz", period=5, failures=3),
        "startupProbe": _probe("/livez", period=2, failures=max(5, math.ceil(start_limit / 2))),
    }


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": STATUS_PORT},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def make_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a container for celery5's arguments; its probes are reachable from outside of the pod."""
    status = (
        "--status-host",
        "0.0.0.0",
        "--status-port",
        str(STATUS_PORT),
    )  # the pod has a network of its own
    # Kubernetes has $(VARIABLE) in commands, and $$ for a dollar.
    return ["celery5", *(word.replace("$", "$$") for word in (*arguments, *status))]


def make_variables(environment: Mapping[str, str]) -> list[Manifest]:
    """Return variables of a container, whose values are taken as they are."""
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in environment.items()]


def get_kill_delay(stop_after: float) -> int:
    """Return the seconds after SIGTERM at which Kubernetes kills a process: later than it ends by itself."""
    return math.ceil(stop_after) + KILL_MARGIN


def build_deployment(
    app: str, member: Member, template: Manifest, *, hung_after: float, start_limit: float
) -> Manifest:
    """Return the Deployment of a member that should run, made from the `template` of a PodTemplate.

    The member's command, its variables and its stop timeout take the place of those of the template.
    """
    name = get_deployment_name(app, member.name)
    labels = {
        "app.kubernetes.io/name": to_name(app, MAX_LABEL),
        "app.kubernetes.io/component": member.kind,
        "app.kubernetes.io/instance": name,
        MANAGER_LABEL: MANAGER,
        APP_LABEL: to_name(app, MAX_LABEL),
        "celery5/group": to_name(member.group, MAX_LABEL),
    }
    described = template.get("metadata", {})
    annotations = {MEMBER_ANNOTATION: member.name}
    spec = dict(template.get("spec", {}))
    containers = [dict(container) for container in spec.get("containers", ())]
    index = next(
        (place for place, container in enumerate(containers) if container.get("name") == CONTAINER), 0
    )
    container = containers[index]
    own = make_variables(member.environment)
    names = {variable["name"] for variable in own}
    container["env"] = [
        variable for variable in container.get("env", ()) if variable["name"] not in names
    ] + own
    container["command"] = make_command(member.arguments)
    container.pop("args", None)
    for probe, manifest in make_probes(hung_after, start_limit).items():
        container.setdefault(probe, manifest)
    spec["containers"] = containers
    spec["terminationGracePeriodSeconds"] = get_kill_delay(member.stop_after)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": {
            "replicas": 1,
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": {"app.kubernetes.io/instance": name, MANAGER_LABEL: MANAGER}},
            # A member's name is its own: its former pod must be gone first.
            "strategy": {"type": "Recreate"},
            "template": {
                "metadata": {
                    "labels": {**described.get("labels", {}), **labels},
                    "annotations": {**described.get("annotations", {}), **annotations},
                },
                "spec": spec,
            },
        },
    }


class ContainerEnd(msgspec.Struct, frozen=True):
    """How the process of a pod ended last."""

    how: str
    code: int | None = None


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a member, read from its pod."""

    uid: str
    name: str
    member: str
    created: str = ""
    is_ready: bool = False
    is_terminating: bool = False
    # How often Kubernetes has started its container again.
    restarts: int = 0
    # The container does not run now.
    has_ended: bool = False
    end: ContainerEnd | None = None
    # Why it is not started yet.
    waiting: str = ""
    # Its node when that does not answer.
    lost_node: str = ""
    # Where it answers probes; "" while it has no address.
    readiness_url: str = ""

    @property
    def state(self) -> State:
        """Return the state of its member."""
        return "stopping" if self.is_terminating else "up" if self.is_ready else "starting"

    @property
    def end_reason(self) -> ContainerEnd:
        """Return how its process ended, as far as the pod shows it."""
        if self.end is not None:
            return self.end
        return ContainerEnd(f"its pod was removed: {self.waiting}" if self.waiting else "its pod was removed")


def read_pod(pod: Mapping[str, Any]) -> PodStatus:
    """Return the state of a member from its pod, an object of the API. Missing fields have the defaults of the API."""
    metadata, status = _get_table(pod, "metadata"), _get_table(pod, "status")
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    statuses: Sequence[Mapping[str, Any]] = status.get("containerStatuses") or ()
    container = next(
        (container for container in statuses if container.get("name") == CONTAINER),
        statuses[0] if statuses else {},
    )
    current = _get_table(container, "state")
    ended = _get_table(current, "terminated") or _get_table(_get_table(container, "lastState"), "terminated")
    is_lost = status.get("reason") == "NodeLost" or status.get("phase") == "Unknown"
    end: ContainerEnd | None = None
    if status.get("phase") == "Failed" and not ended:
        end = ContainerEnd(_join(status.get("reason") or "its pod failed", status.get("message")))
    elif ended:
        end = _read_end(ended)
    return PodStatus(
        uid=metadata.get("uid", ""),
        name=metadata.get("name", ""),
        member=read_member_name(pod),
        created=metadata.get("creationTimestamp", ""),
        is_ready=_get_table(conditions, "Ready").get("status") == "True",
        is_terminating=bool(metadata.get("deletionTimestamp")),
        restarts=container.get("restartCount", 0),
        has_ended=bool(current.get("terminated")) or status.get("phase") in ("Failed", "Succeeded"),
        end=end,
        waiting=_read_waiting(_get_table(current, "waiting"), _get_table(conditions, "PodScheduled")),
        readiness_url=_find_readiness_url(pod),
        lost_node=(_get_table(pod, "spec").get("nodeName") or "?") if is_lost else "",
    )


def read_member_name(item: Mapping[str, Any]) -> str:
    """Return the member of a pod or a Deployment; "" for none."""
    return str(_get_table(_get_table(item, "metadata"), "annotations").get(MEMBER_ANNOTATION, ""))


def _find_readiness_url(pod: Mapping[str, Any]) -> str:
    """Return the URL of a pod's readiness probe, which other pods can ask, too; "" while it has no address."""
    address = str(_get_table(pod, "status").get("podIP") or "")
    containers: Sequence[Mapping[str, Any]] = _get_table(pod, "spec").get("containers") or ()
    ports: list[Mapping[str, Any]] = [
        port for container in containers for port in container.get("ports") or ()
    ]
    port = next((port["containerPort"] for port in ports if port.get("name") == "status"), STATUS_PORT)
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}/readyz" if address else ""


def _get_table(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty one where it is missing."""
    return cast("Mapping[str, Any]", item.get(name) or {})


def _read_waiting(waiting: Mapping[str, Any], scheduled: Mapping[str, Any]) -> str:
    if scheduled.get("status") == "False":
        return _join(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    if waiting.get("reason") in (None, "ContainerCreating", "PodInitializing"):
        return ""
    return _join(waiting["reason"], waiting.get("message"))


def _read_end(ended: Mapping[str, Any]) -> ContainerEnd:
    code, signal = ended.get("exitCode"), ended.get("signal") or 0
    if code is not None and code > 128 and not signal:
        signal = code - 128  # as a shell has it
    message = ended.get("message")
    if ended.get("reason") == "OOMKilled":
        return ContainerEnd(_join("it needed more memory than its pod may have: OOMKilled", message), -9)
    if signal:
        return ContainerEnd(_join(f"ended by signal {signal}", message), -signal)
    return ContainerEnd(_join(f"ended with exit code {code}", message), code)


def _join(what: str, message: str | None) -> str:
    text = f"{what}: {message}" if message else what
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())[
        :MAX_MESSAGE
    ]


class PodChange(msgspec.Struct, frozen=True):
    """A change of a member's process between two states of its pods."""

    what: Literal["ready", "stopping", "exited", "gone"]
    end: ContainerEnd | None = None


def get_changes(
    before: PodStatus | None, pods: Mapping[str, PodStatus]
) -> tuple[PodStatus | None, list[PodChange]]:
    """Return the pod that is the member now, and what has happened to it since it was `before`.

    A pod is followed until it is gone, or until a newer one is ready: then its node does not answer any more, since no
    two processes of one name get ready. `exited` means that its process has ended by itself, and that Kubernetes starts
    it again.
    """
    newest = max(pods.values(), key=lambda pod: (not pod.is_terminating, pod.created, pod.uid), default=None)
    changes: list[PodChange] = []
    now = None if before is None else pods.get(before.uid)
    if (
        before is not None
        and now is not None
        and now is not newest
        and newest is not None
        and newest.is_ready
    ):
        now = None
    if before is not None and now is None:
        changes.append(PodChange("gone", before.end_reason))
        before = None
    if now is None:
        now = newest
    if now is None:
        return None, changes
    has_restarted = before is not None and now.restarts > before.restarts
    if not now.is_terminating and (has_restarted or (now.has_ended and not (before and before.has_ended))):
        changes.append(PodChange("exited", now.end_reason))
    elif now.is_terminating and not (before is not None and before.is_terminating):
        changes.append(PodChange("stopping"))
    elif now.is_ready and not (before is not None and before.is_ready):
        changes.append(PodChange("ready"))
    return now, changes
