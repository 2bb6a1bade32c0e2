"""Make the manifests with which an application runs on Kubernetes: plain, as a kustomize base, or as a Helm chart.

There are two ways. Without a Controller each group is a Deployment, which Kubernetes keeps, and KEDA scales by the
number of workers that the Scheduler wants. With one, the Controller makes the Deployments of members itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, cast
from urllib.parse import quote

import msgspec

from celery5.protocol.cluster.description import Cluster, Group, build_members, distribute_workers
from celery5.protocol.cluster.members import Member
from celery5.protocol.cluster.pods import (
    CONTAINER,
    MAX_LABEL,
    STATUS_PORT,
    Manifest,
    get_kill_delay,
    make_command,
    make_probes,
    make_variables,
    to_name,
)

FOLDER = "/run/celery5"
"""The only folder in which processes may write, besides /tmp."""
MEMORY_FACTOR = 1.25
"""The memory limit of a pod divided by `max_memory`. The kernel kills at the first, a worker recycles at the second."""
COPY_KEYS = (
    f"umask 077 && mkdir -p {FOLDER}/keys/trusted"
    f" && cp -L /etc/celery5/keys/mine.pem {FOLDER}/keys/mine.pem"
    f" && cp -L /etc/celery5/keys/trusted.pem {FOLDER}/keys/trusted/cluster.pem"
)
"""Copies the keys: they must be private to the user, and files in the volume of a Secret are not."""
DASHBOARD_PORT = 8555
CONTROLLER_STOP_AFTER = 30.0
"""Seconds that a Controller may take to end: it leaves its members alone."""
CANARY_SECONDS = 10
"""Seconds for which a new pod must be ready before the next one is replaced."""
RESTARTS = ("restart_limit", "restart_period")
"""Settings that decide when a Foreman gives up a member."""
SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""What a container may do."""
Scaler = Literal["", "cpu", "keda"]


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster description does not say."""

    # The application as -A has it, and its name.
    target: str
    name: str
    image: str
    # All queues of the application: those of workers whose group names none.
    queues: Sequence[str] = ("default",)
    namespace: str = "default"
    # The Secret with the broker's URL, in the entry `url`.
    broker: str = "celery5-broker"
    # A Secret with the entries `mine.pem` and `trusted.pem`; "" for none.
    keys: str = ""
    # What scales workers, from `minimum` to `maximum` in all groups together; "" for nothing.
    scaler: Scaler = ""
    minimum: int = 1
    maximum: int = 1
    # The Secret with the entry `tokens` for the dashboard; "" for no dashboard.
    dashboard: str = ""
    # The groups of Prometheus' rules; with them there is a ServiceMonitor, too.
    rules: Sequence[Mapping[str, Any]] = ()


def make_manifests(cluster: Cluster, options: KubernetesOptions) -> list[Manifest]:
    """Return the manifests for a cluster without a Controller."""
    manifests = [manifest for group in cluster.groups for manifest in _of_group(cluster, group, options)]
    return [*manifests, *_shared(options)]


def make_controller_manifests(
    cluster: Cluster, description: str, options: KubernetesOptions
) -> list[Manifest]:
    """Return the manifests for a Controller, which reads the `description`, and for the members that it starts."""
    name = to_name(options.name)
    account = f"{name}-controller"
    command = (
        "controller",
        "start",
        "--cluster",
        "/etc/celery5/cluster/cluster.toml",
        "--name",
        "$(POD_NAME)",
    )
    spec = _pod(options, cluster.environment)
    container = spec["containers"][0]
    container |= {"command": _make_command(command), **make_probes(cluster.hung_after, cluster.start_limit)}
    container["volumeMounts"] = [
        *container["volumeMounts"],
        {"name": "cluster", "mountPath": "/etc/celery5/cluster", "readOnly": True},
    ]
    spec["volumes"] = [*spec["volumes"], {"name": "cluster", "configMap": {"name": account}}]
    spec |= {"serviceAccountName": account, "automountServiceAccountToken": True}
    spec["terminationGracePeriodSeconds"] = get_kill_delay(CONTROLLER_STOP_AFTER)
    template = {"metadata": {"labels": _labels(options)}, "spec": _pod(options, {})}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": options.namespace}
    return [
        _object("v1", "ServiceAccount", account, options),
        _object("rbac.authorization.k8s.io/v1", "Role", account, options, rules=list(CONTROLLER_RULES)),
        _object(
            "rbac.authorization.k8s.io/v1", "RoleBinding", account, options, roleRef=reference, subjects=[subject]
        ),
        _object("v1", "ConfigMap", account, options, data={"cluster.toml": description}),
        _object("v1", "PodTemplate", name, options, template=template),
        _deployment(account, "controller", spec, options, replicas=2),
        *[_budget(f"{name}-{kind}", {**_selector(options), "app.kubernetes.io/component": kind}, options)
          for kind in sorted({"controller", *(group.kind for group in cluster.groups)})],
        *_shared(options),
    ]  # fmt: skip


CONTROLLER_RULES: Sequence[Manifest] = (
    {
        "apiGroups": ["apps"],
        "resources": ["deployments"],
        "verbs": ["get", "list", "create", "update", "patch", "delete"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]},
    {"apiGroups": [""], "resources": ["podtemplates"], "verbs": ["get"]},
)
"""What a Controller may do in its namespace, and no more."""


def find_omissions(cluster: Cluster, options: KubernetesOptions) -> Iterator[str]:
    """Yield a line for each part of the description that has no manifest without a Controller, and what to do."""
    if cluster.broker is not None:
        yield (
            "[broker] is left out: no Controller runs a server here. Run Redis or Valkey yourself, and put its "
            f"URL into the Secret {options.broker!r}, entry 'url'"
        )
    if cluster.hosts:
        yield "[hosts] is left out: Kubernetes chooses the nodes"
    if cluster.platform not in (Cluster().platform, "kubernetes"):
        yield f"platform = {cluster.platform!r} is left out: Kubernetes starts the members"
    workers = [
        group.flags.get("queues") or options.queues for group in cluster.groups if group.kind == "worker"
    ]
    if unread := sorted(set(options.queues) - {queue for queues in workers for queue in queues}):
        yield f"no workers read {', '.join(unread)}: add them to the queues of a group"
    restarts = [name for name in RESTARTS if getattr(cluster, name) != getattr(Cluster(), name)]
    if restarts:
        yield f"{' and '.join(restarts)} left out: Kubernetes restarts a member without end, with growing delays"
    if cluster.canary:
        yield "canary is left out: a Deployment looks at probes, not at jobs"


def _object(version: str, kind: str, name: str, options: KubernetesOptions, **content: Any) -> Manifest:
    metadata = {"name": name, "namespace": options.namespace, "labels": _labels(options)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _selector(options: KubernetesOptions) -> Manifest:
    """Return the labels by which everything of the application is found."""
    return {"app.kubernetes.io/name": to_name(options.name, MAX_LABEL)}


def _labels(options: KubernetesOptions) -> Manifest:
    return {**_selector(options), "app.kubernetes.io/part-of": "celery5"}


def _get_group_name(group: Group, options: KubernetesOptions) -> str:
    return to_name(f"{options.name}-{group.key}")


def _of_group(cluster: Cluster, group: Group, options: KubernetesOptions) -> Iterator[Manifest]:
    name = _get_group_name(group, options)
    least, most = _get_limits(cluster, group, options)
    member = _make_member(group)
    spec = _pod(options, {**member.environment, **cluster.environment, **group.environment})
    container = spec["containers"][0]
    words = ["$(POD_NAME)" if word == member.name else word for word in member.arguments]
    container |= {"command": _make_command(words), **make_probes(cluster.hung_after, cluster.start_limit)}
    container["resources"] = _make_resources(group)
    if group.kind == "publisher":
        # Its clients must stop using it before it stops. The other kinds have no clients, and need no delay.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    spec["terminationGracePeriodSeconds"] = get_kill_delay(member.stop_after)
    # A scaled group has no number: each `apply` would undo the scaler.
    replicas = group.total if most is None else None
    yield _deployment(name, group.kind, spec, options, replicas=replicas)
    if (most or group.total) > 1:
        yield _budget(name, {"app.kubernetes.io/instance": name}, options)
    if most is not None:
        make_scaler = _scale_by_jobs if options.scaler == "keda" else _scale_by_cpu
        yield make_scaler(cluster, group, options, least, most)


def _get_limits(cluster: Cluster, group: Group, options: KubernetesOptions) -> tuple[int, int | None]:
    """Return the fewest and the most workers of a group: its part of those of the application. None: not scaled."""
    if group.kind != "worker" or not options.scaler:
        return group.total, None
    most = max(1, distribute_workers(cluster, options.maximum)[group.key])
    least = min(distribute_workers(cluster, options.minimum)[group.key], most)
    return (least if options.scaler == "keda" else max(least, 1)), most


def _make_member(group: Group) -> Member:
    """Return one member of a group, without flags that only one process of a machine can have."""
    flags = {name: value for name, value in group.flags.items() if name not in ("status_port", "status_host")}
    (member,) = build_members(Cluster(groups=(Group(kind=group.kind, name=group.name, flags=flags),)))
    return member


def _make_command(words: Sequence[str]) -> list[str]:
    """Return the command of a container, with the name of its pod where `$(POD_NAME)` is."""
    return [word.replace("$$(POD_NAME)", "$(POD_NAME)") for word in make_command(words)]


def _deployment(
    name: str, kind: str, spec: Manifest, options: KubernetesOptions, *, replicas: int | None
) -> Manifest:
    own = {"app.kubernetes.io/component": kind, "app.kubernetes.io/instance": name}
    labels = {**_labels(options), **own}
    selector = {"matchLabels": {**_selector(options), "app.kubernetes.io/instance": name}}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector,
    }
    made = _object("apps/v1", "Deployment", name, options)
    made["metadata"]["labels"] = labels
    made["spec"] = {
        **({} if replicas is None else {"replicas": replicas}),
        "selector": selector,
        # One new pod is up, and stays so for a while, before an old one stops: a version that does not work
        # replaces nothing.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "minReadySeconds": CANARY_SECONDS,
        "template": {"metadata": {"labels": labels}, "spec": {**spec, "topologySpreadConstraints": [spread]}},
    }
    return made


def _budget(name: str, labels: Manifest, options: KubernetesOptions) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return _object("policy/v1", "PodDisruptionBudget", name, options, spec=spec)


def _pod(options: KubernetesOptions, environment: Mapping[str, str]) -> Manifest:
    """Return what the pods of all processes have."""
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": CONTAINER,
                "image": options.image,
                "env": list(_list_variables(options, environment)),
                "ports": [{"name": "status", "containerPort": STATUS_PORT}],
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                "securityContext": SECURITY,
                "volumeMounts": [{"name": "run", "mountPath": FOLDER}, {"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [
            {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if options.keys:
        spec["initContainers"] = [_copy_keys(options)]
        spec["volumes"].append({"name": "keys", "secret": {"secretName": options.keys, "defaultMode": 0o440}})
    return spec


def _list_variables(options: KubernetesOptions, environment: Mapping[str, str]) -> Iterator[Manifest]:
    yield {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    secret = {"name": options.broker, "key": "url"}
    yield {"name": "CELERY5_BROKER", "valueFrom": {"secretKeyRef": secret}}
    keys = {"CELERY5_KEYS": f"{FOLDER}/keys"} if options.keys else {}
    own = {"CELERY5_APP": options.target, "XDG_STATE_HOME": FOLDER, **keys}
    yield from make_variables({**own, **environment})


def _copy_keys(options: KubernetesOptions) -> Manifest:
    return {
        "name": "keys",
        "image": options.image,
        "command": ["sh", "-c", COPY_KEYS],
        "securityContext": SECURITY,
        "volumeMounts": [
            {"name": "run", "mountPath": FOLDER},
            {"name": "keys", "mountPath": "/etc/celery5/keys", "readOnly": True},
        ],
    }


def _make_resources(group: Group) -> Manifest:
    memory = math.ceil(group.flags.get("max_memory", 0) * MEMORY_FACTOR / 2**20)
    limits = {"limits": {"memory": f"{memory}Mi"}} if memory else {}
    return {"requests": {"cpu": "100m", "memory": "128Mi"}, **limits}


def _scale_by_jobs(
    cluster: Cluster, group: Group, options: KubernetesOptions, least: int, most: int
) -> Manifest:
    """Return a KEDA object that runs as many workers as a Scheduler wants.

    The only group has as many as the Scheduler has decided; one of several those that its queues need.
    """
    workers = [other for other in cluster.groups if other.kind == "worker"]
    queues: Sequence[str] = group.flags.get("queues") or (options.queues if len(workers) > 1 else ())
    path = "/".join(("wanted-workers", *([quote(",".join(queues), safe=",")] if queues else ())))
    service = f"{to_name(options.name)}-scheduler.{options.namespace}.svc"
    trigger = {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": f"http://{service}:{STATUS_PORT}/{path}",
            "valueLocation": "wanted_workers",
            "targetValue": "1",
            "activationTargetValue": "0",
        },
    }
    spec = {
        "scaleTargetRef": {"name": _get_group_name(group, options)},
        "pollingInterval": 5,
        "cooldownPeriod": 60,
        "minReplicaCount": least,
        "maxReplicaCount": most,
        "advanced": {
            "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 60}}}
        },
        "triggers": [trigger],
    }
    return _object("keda.sh/v1alpha1", "ScaledObject", _get_group_name(group, options), options, spec=spec)


def _scale_by_cpu(
    _cluster: Cluster, group: Group, options: KubernetesOptions, least: int, most: int
) -> Manifest:
    name = _get_group_name(group, options)
    utilization = {"type": "Utilization", "averageUtilization": 70}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": least,
        "maxReplicas": most,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": utilization}}],
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", name, options, spec=spec)


def _shared(options: KubernetesOptions) -> Iterator[Manifest]:
    """Yield what there is once for an application: services, the network policy, the dashboard, what is monitored."""
    name = to_name(options.name)
    status = [{"name": "status", "port": STATUS_PORT, "targetPort": STATUS_PORT}]
    everything = _selector(options)
    scheduler = {**everything, "app.kubernetes.io/component": "scheduler"}
    yield _service(f"{name}-scheduler", scheduler, status, options)
    ports = [{"protocol": "TCP", "port": STATUS_PORT}]
    if options.dashboard:
        ports.append({"protocol": "TCP", "port": DASHBOARD_PORT})
        yield _dashboard(name, options)
        port = {"name": "http", "port": DASHBOARD_PORT, "targetPort": DASHBOARD_PORT}
        shown = {**everything, "app.kubernetes.io/component": "dashboard"}
        yield _service(f"{name}-dashboard", shown, [port], options)
    policy = {
        "podSelector": {"matchLabels": everything},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": ports}],
    }
    yield _object("networking.k8s.io/v1", "NetworkPolicy", name, options, spec=policy)
    if options.rules:
        metrics = _service(f"{name}-metrics", everything, status, options)
        metrics["metadata"]["labels"] = {**metrics["metadata"]["labels"], "celery5/metrics": "true"}
        metrics["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        yield metrics
        monitor = {
            "selector": {"matchLabels": {**everything, "celery5/metrics": "true"}},
            "jobLabel": "app.kubernetes.io/name",
            "endpoints": [{"port": "status", "path": "/metrics", "interval": "15s"}],
        }
        yield _object("monitoring.coreos.com/v1", "ServiceMonitor", name, options, spec=monitor)
        rules = {"groups": [dict(group) for group in options.rules]}
        yield _object("monitoring.coreos.com/v1", "PrometheusRule", name, options, spec=rules)


def _service(
    name: str, selector: Manifest, ports: Sequence[Manifest], options: KubernetesOptions
) -> Manifest:
    return _object("v1", "Service", name, options, spec={"selector": selector, "ports": list(ports)})


def _dashboard(name: str, options: KubernetesOptions) -> Manifest:
    spec = _pod(options, {})
    container = spec["containers"][0]
    host = f"{name}-dashboard.{options.namespace}.svc:{DASHBOARD_PORT}"
    tokens = "/etc/celery5/dashboard/tokens"
    words = ("dashboard", "start", "--host", "0.0.0.0", "--port", str(DASHBOARD_PORT), "--tokens", tokens)
    container["command"] = ["celery5", *words, "--public-host", host]
    container["ports"] = [{"name": "http", "containerPort": DASHBOARD_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": DASHBOARD_PORT}, "periodSeconds": 5}
    mount = {"name": "tokens", "mountPath": "/etc/celery5/dashboard", "readOnly": True}
    container["volumeMounts"] = [*container["volumeMounts"], mount]
    secret = {"secretName": options.dashboard, "defaultMode": 0o440}
    spec["volumes"] = [*spec["volumes"], {"name": "tokens", "secret": secret}]
    return _deployment(f"{name}-dashboard", "dashboard", spec, options, replicas=1)


# Other forms of the same manifests.


def make_kustomize_base(manifests: Sequence[Manifest], namespace: str) -> dict[str, Manifest]:
    """Return the files of a kustomize base, by name."""
    files = {_get_file_name(manifest): manifest for manifest in manifests}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": sorted(files),
    }
    return {**files, "kustomization.yaml": kustomization}


def _get_file_name(manifest: Manifest) -> str:
    return f"{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml"


class Expression(str):
    """A template of Helm, in place of a value."""

    __slots__ = ()


def make_chart(
    manifests: Sequence[Manifest], options: KubernetesOptions, version: str
) -> dict[str, Manifest]:
    """Return the files of a Helm chart, by name. With its own values it makes the same manifests.

    Its values are the image, the Secret with the broker's URL, and the numbers of each group; the namespace is the
    release's.
    """
    values: Manifest = {"image": options.image, "broker": options.broker, "groups": {}}
    files = {
        f"templates/{_get_file_name(manifest)}": _to_template(manifest, values, options)
        for manifest in manifests
    }
    chart = {
        "apiVersion": "v2",
        "name": to_name(options.name),
        "description": f"{options.name}, made by celery5 kubernetes manifests",
        "type": "application",
        "version": version,
    }
    return {"Chart.yaml": chart, "values.yaml": values, **files}


_NUMBERS = ("replicas", "minReplicaCount", "maxReplicaCount", "minReplicas", "maxReplicas")


def _to_template(manifest: Manifest, values: Manifest, options: KubernetesOptions) -> Manifest:
    """Return a manifest with expressions of Helm, and put what they stand for into `values`."""
    made: Manifest = _escape(manifest, options)
    del made["metadata"]["namespace"]
    name = manifest["metadata"]["name"]
    numbers = [number for number in _NUMBERS if number in manifest.get("spec", {})]
    for number in numbers:
        values["groups"].setdefault(name, {})[number] = manifest["spec"][number]
        made["spec"][number] = Expression(f'{{{{ (index .Values.groups "{name}").{number} }}}}')
    return made


def _escape(value: Any, options: KubernetesOptions, key: str = "") -> Any:
    """Return a value as it stands in a template: what Helm would take for an expression is quoted."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        named = {name: _escape(item, options, name) for name, item in table.items()}
        if key == "secretKeyRef" and table["name"] == options.broker:
            named["name"] = Expression("{{ .Values.broker | quote }}")
        return named
    if isinstance(value, list | tuple):
        return [_escape(item, options) for item in cast("Sequence[Any]", value)]
    if not isinstance(value, str):
        return value
    if key == "image":
        return Expression("{{ .Values.image | quote }}")
    text = value.replace("{{", '{{ "{{" }}')
    if key in ("url", "namespace") or ".svc:" in value:
        text = text.replace(f".{options.namespace}.svc", ".{{ .Release.Namespace }}.svc")
    return "{{ .Release.Namespace }}" if key == "namespace" else text
