"""Kubernetes types: as much of its API as our manifests use, so strict that what it would refuse does not fit.

They are written after the reference of the API (v1, apps/v1, policy/v1, autoscaling/v2) and of KEDA (v1alpha1). Fields
that are not here are not ours to use.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
LabelName = Annotated[str, Meta(pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
Labels = dict[LabelName, Label]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
PortName = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,15}$")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(m|Ki|Mi|Gi)?$")]
Resource = Literal["cpu", "memory"]


class Strict(Struct, forbid_unknown_fields=True, rename="camel"):
    """Nothing else fits."""


class Metadata(Strict):
    name: Name
    namespace: Name
    labels: Labels


class Selector(Strict):
    match_labels: Labels


class KeyOf(Strict):
    name: Name
    key: str


class FieldOf(Strict):
    field_path: Literal["metadata.name"]


class ValueFrom(Strict):
    secret_key_ref: KeyOf | None = None
    field_ref: FieldOf | None = None


class Env(Strict):
    name: Variable
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(Strict):
    name: PortName
    container_port: Port


class HttpGet(Strict):
    path: str
    port: PortName


class Probe(Strict):
    http_get: HttpGet
    period_seconds: Positive
    timeout_seconds: Positive
    failure_threshold: Positive


class Exec(Strict):
    command: list[str]


class Handler(Strict):
    exec: Exec


class Lifecycle(Strict):
    pre_stop: Handler


class Resources(Strict):
    requests: dict[Resource, Quantity]
    limits: dict[Resource, Quantity] = {}


class Capabilities(Strict):
    drop: list[Literal["ALL"]]


class OfContainer(Strict):
    allow_privilege_escalation: bool
    read_only_root_filesystem: bool
    capabilities: Capabilities


class Mount(Strict):
    name: Name
    mount_path: Annotated[str, Meta(pattern="^/")]
    read_only: bool = False


class Container(Strict, kw_only=True):
    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[Env] = []
    ports: list[ContainerPort] = []
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    startup_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    resources: Resources | None = None
    security_context: OfContainer
    volume_mounts: list[Mount]


class Seccomp(Strict):
    type: Literal["RuntimeDefault"]


class OfPod(Strict):
    run_as_non_root: bool
    run_as_user: Positive
    run_as_group: Positive
    fs_group: Positive
    seccomp_profile: Seccomp


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class SecretVolume(Strict):
    secret_name: Name
    default_mode: Annotated[int, Meta(ge=0, le=0o777)]


class Volume(Strict):
    name: Name
    empty_dir: EmptyDir | None = None
    secret: SecretVolume | None = None


class Pod(Strict, kw_only=True):
    automount_service_account_token: bool
    termination_grace_period_seconds: Positive
    security_context: OfPod
    init_containers: list[Container] = []
    containers: Annotated[list[Container], Meta(min_length=1)]
    volumes: list[Volume]


class TemplateMetadata(Strict):
    labels: Labels


class Template(Strict):
    metadata: TemplateMetadata
    spec: Pod


class RollingUpdate(Strict):
    max_surge: Natural
    max_unavailable: Natural


class Strategy(Strict):
    type: Literal["RollingUpdate"]
    rolling_update: RollingUpdate


class DeploymentSpec(Strict, kw_only=True):
    replicas: Natural | None = None
    selector: Selector
    strategy: Strategy
    template: Template


class Deployment(Strict, tag_field="kind", tag="Deployment"):
    api_version: Literal["apps/v1"]
    metadata: Metadata
    spec: DeploymentSpec


class BudgetSpec(Strict):
    max_unavailable: Natural
    selector: Selector


class Budget(Strict, tag_field="kind", tag="PodDisruptionBudget"):
    api_version: Literal["policy/v1"]
    metadata: Metadata
    spec: BudgetSpec


class Target(Strict):
    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    name: Name


class Utilization(Strict):
    type: Literal["Utilization"]
    average_utilization: Positive


class ResourceMetric(Strict):
    name: Resource
    target: Utilization


class Metric(Strict):
    type: Literal["Resource"]
    resource: ResourceMetric


class AutoscalerSpec(Strict):
    scale_target_ref: Target
    min_replicas: Positive
    max_replicas: Positive
    metrics: list[Metric]


class Autoscaler(Strict, tag_field="kind", tag="HorizontalPodAutoscaler"):
    api_version: Literal["autoscaling/v2"]
    metadata: Metadata
    spec: AutoscalerSpec


class KedaTarget(Strict):
    name: Name


class Streams(Strict):
    address: Annotated[str, Meta(pattern=r"^[^/:]+:[0-9]+$")]
    stream: str
    consumer_group: str
    lag_count: Annotated[str, Meta(pattern="^[0-9]+$")]


class Trigger(Strict):
    type: Literal["redis-streams"]
    metadata: Streams


class ScaledSpec(Strict):
    scale_target_ref: KedaTarget
    min_replica_count: Natural
    max_replica_count: Positive
    cooldown_period: Natural
    triggers: Annotated[list[Trigger], Meta(min_length=1)]


class ScaledObject(Strict, tag_field="kind", tag="ScaledObject"):
    api_version: Literal["keda.sh/v1alpha1"]
    metadata: Metadata
    spec: ScaledSpec


class Manifests(Strict, tag_field="kind", tag="List"):
    api_version: Literal["v1"]
    items: list[Deployment | Budget | Autoscaler | ScaledObject]
