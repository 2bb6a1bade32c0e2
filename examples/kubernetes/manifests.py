"""Make the Kubernetes manifests of a cluster description: a Deployment for each group, and what scales it.

Kubernetes does what a Foreman does: it keeps the wanted number of pods alive, probes them, and replaces them one after
the other. So no manifest has a Controller. A pod is one member, and has its name.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery5.broker.keys import Keys
from celery5.protocol.cluster.description import Cluster, Group, build_members
from celery5.protocol.cluster.members import Member

PORT = 9500
"""The port in a pod on which a member answers probes."""
SURPLUS = 15
"""Seconds after a member's own stop timeout at which Kubernetes kills its pod."""
FOLDER = "/run/celery5"
"""The only folder in which members may write."""
ROOM = 1.25
"""The memory limit of a pod divided by `max_memory`. The kernel kills at the first, a worker recycles at the second."""
COPY_KEYS = (
    f"umask 077 && mkdir -p {FOLDER}/keys/trusted"
    f" && cp -L /etc/celery5/keys/mine.pem {FOLDER}/keys/mine.pem"
    f" && cp -L /etc/celery5/keys/trusted.pem {FOLDER}/keys/trusted/cluster.pem"
)
"""Copies the keys: they must be private to the user, and files in the volume of a Secret are not."""
RESTARTS = ("restart_limit", "restart_period")
"""Settings that decide when a Foreman gives up a member."""
Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The options that a cluster description does not have."""

    # The application as -A has it.
    app: str
    # The name of the application.
    name: str
    image: str
    # The queues of workers whose group names none: all that the application uses.
    queues: Sequence[str] = ("default",)
    namespace: str = "default"
    # The Secret with the broker's URL, in the entry `url`.
    broker: str = "celery5-broker"
    # A Secret with the entries `mine.pem` and `trusted.pem`; '' for none.
    keys: str = ""
    # The most workers of a group when it is scaled; 0 for no scaling.
    most: int = 0
    # host:port of Redis, for KEDA to scale by waiting jobs; '' to scale by CPU.
    keda: str = ""
    labels: dict[str, str] = field(default_factory=dict[str, str])


def manifests(cluster: Cluster, wishes: Wishes) -> Manifest:
    """Return one list of all manifests."""
    items = [manifest for group in cluster.groups for manifest in _of_group(cluster, group, wishes)]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def left_out(cluster: Cluster, wishes: Wishes) -> Iterator[str]:
    """Yield a line for each part of the description that has no manifest, and what to do instead."""
    if cluster.broker is not None:
        yield (
            "[broker] is left out: no Controller runs a server here. Run Redis or Valkey yourself, and put its "
            f"URL into the Secret {wishes.broker!r}, entry 'url'"
        )
    if cluster.hosts:
        yield "[hosts] is left out: Kubernetes chooses the nodes"
    if cluster.platform != Cluster().platform:
        yield f"platform = {cluster.platform!r} is left out: Kubernetes starts the members"
    restarts = [name for name in RESTARTS if getattr(cluster, name) != getattr(Cluster(), name)]
    if restarts:
        yield f"{' and '.join(restarts)} left out: Kubernetes restarts a member without end, with growing delays"
    if cluster.canary:
        yield "canary is left out: a Deployment looks at probes, not at jobs"


def _of_group(cluster: Cluster, group: Group, wishes: Wishes) -> Iterator[Manifest]:
    yield _deployment(cluster, group, wishes)
    if group.total > 1:
        budget = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(group, wishes)}}
        yield _object("policy/v1", "PodDisruptionBudget", group, wishes, budget)
    if group.kind == "worker" and wishes.most > group.total:
        yield _by_queues(group, wishes) if wishes.keda else _by_cpu(group, wishes)


def _object(version: str, kind: str, group: Group, wishes: Wishes, spec: Manifest) -> Manifest:
    labels = {**wishes.labels, **_labels(group, wishes)}
    metadata = {"name": _called(group, wishes), "namespace": wishes.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _called(group: Group, wishes: Wishes) -> str:
    """Return the name of a group, a DNS label."""
    name = re.sub(r"[^a-z0-9-]+", "-", f"{wishes.name}-{group.key}".lower()).strip("-")
    return name[:52].rstrip("-")  # the names of its pods have 11 more characters


def _labels(group: Group, wishes: Wishes) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": wishes.name,
        "app.kubernetes.io/component": group.kind,
        "app.kubernetes.io/instance": _called(group, wishes),
        "app.kubernetes.io/managed-by": "celery5",
    }


def _deployment(cluster: Cluster, group: Group, wishes: Wishes) -> Manifest:
    labels = {**wishes.labels, **_labels(group, wishes)}
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(_member(group).stop_after) + SURPLUS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(cluster, group, wishes)],
        "volumes": list(_volumes(wishes)),
    }
    if wishes.keys:
        pod["initContainers"] = [_copies_keys(wishes)]
    spec: Manifest = {
        "selector": {"matchLabels": _labels(group, wishes)},
        # A new pod is up before an old one stops, so no job waits for a new version.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    if not (group.kind == "worker" and wishes.most > group.total):
        spec["replicas"] = group.total  # not set for a scaled group: each `apply` would undo the scaler
    return _object("apps/v1", "Deployment", group, wishes, spec)


def _container(cluster: Cluster, group: Group, wishes: Wishes) -> Manifest:
    container: Manifest = {
        "name": group.kind,
        "image": wishes.image,
        "args": ["celery5", *_arguments(group)],
        "env": list(_environment(cluster, group, wishes)),
        "ports": [{"name": "status", "containerPort": PORT}],
        # A member whose event loop is stuck does not answer. It gets as much time as from a Foreman.
        "livenessProbe": _probe("/livez", period=10, failures=max(3, math.ceil(cluster.hung_after / 10))),
        "readinessProbe": _probe("/readyz", period=5, failures=3),
        "startupProbe": _probe("/livez", period=2, failures=max(5, math.ceil(cluster.start_limit / 2))),
        "resources": _resources(group),
        "securityContext": _OF_CONTAINER,
        "volumeMounts": [{"name": "run", "mountPath": FOLDER}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    if group.kind == "publisher":
        # Its clients must stop using it before it stops. The other kinds have no clients, and need no delay.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    return container


_OF_CONTAINER: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def _arguments(group: Group) -> Iterator[str]:
    """Yield the arguments of a member. Its name is the pod's, and its probes are reachable from outside of the pod."""
    member = _member(group)
    for word in member.arguments:
        # Kubernetes has $(VARIABLE) in arguments, and $$ for a dollar.
        yield "$(POD_NAME)" if word == member.name else word.replace("$", "$$")
    yield from ("--status-host", "0.0.0.0", "--status-port", str(PORT))  # the pod has its own network


def _member(group: Group) -> Member:
    """Return one member of a group, without flags that only one process of a machine can have."""
    flags = {name: value for name, value in group.flags.items() if name not in ("status_port", "status_host")}
    (member,) = build_members(Cluster(groups=(Group(kind=group.kind, name=group.name, flags=flags),)))
    return member


def _environment(cluster: Cluster, group: Group, wishes: Wishes) -> Iterator[Manifest]:
    yield {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    yield {"name": "CELERY5_APP", "value": wishes.app}
    secret = {"name": wishes.broker, "key": "url"}
    yield {"name": "CELERY5_BROKER", "valueFrom": {"secretKeyRef": secret}}
    yield {"name": "XDG_STATE_HOME", "value": FOLDER}
    if wishes.keys:
        yield {"name": "CELERY5_KEYS", "value": f"{FOLDER}/keys"}
    for name, value in {**cluster.environment, **group.environment}.items():
        yield {"name": name, "value": value.replace("$(", "$$(")}


def _probe(path: str, *, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "status"},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(group: Group) -> Manifest:
    memory = math.ceil(group.flags.get("max_memory", 0) * ROOM / 2**20)
    limits = {"limits": {"memory": f"{memory}Mi"}} if memory else {}
    return {"requests": {"cpu": "100m", "memory": "128Mi"}, **limits}


def _volumes(wishes: Wishes) -> Iterator[Manifest]:
    yield {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}
    yield {"name": "tmp", "emptyDir": {}}
    if wishes.keys:
        yield {"name": "keys", "secret": {"secretName": wishes.keys, "defaultMode": 0o440}}


def _copies_keys(wishes: Wishes) -> Manifest:
    return {
        "name": "keys",
        "image": wishes.image,
        "command": ["sh", "-c", COPY_KEYS],
        "securityContext": _OF_CONTAINER,
        "volumeMounts": [
            {"name": "run", "mountPath": FOLDER},
            {"name": "keys", "mountPath": "/etc/celery5/keys", "readOnly": True},
        ],
    }


def _by_queues(group: Group, wishes: Wishes) -> Manifest:
    """Return a KEDA object that scales to one worker for each 100 unread jobs. Needs Redis 7, which counts them."""
    keys = Keys(wishes.name)
    triggers = [
        {
            "type": "redis-streams",
            "metadata": {
                "address": wishes.keda,
                "stream": keys.for_queue(queue).normal,
                "consumerGroup": "workers",
                "lagCount": "100",
            },
        }
        for queue in group.flags.get("queues") or wishes.queues
    ]
    spec = {
        "scaleTargetRef": {"name": _called(group, wishes)},
        "minReplicaCount": group.total,
        "maxReplicaCount": wishes.most,
        "cooldownPeriod": 300,
        "triggers": triggers,
    }
    return _object("keda.sh/v1alpha1", "ScaledObject", group, wishes, spec)


def _by_cpu(group: Group, wishes: Wishes) -> Manifest:
    target = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": _called(group, wishes)},
        "minReplicas": max(1, group.total),
        "maxReplicas": wishes.most,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", group, wishes, spec)
