"""Check manifests as Kubernetes does, by its schemas; and by strict types what it does not have by itself.

The types follow the references of KEDA (v1alpha1) and of the operator of Prometheus (monitoring.coreos.com/v1), whose
schemas no package has.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
from jsonschema import Draft202012Validator
from msgspec import Meta, Struct
from referencing import Registry, Resource

RELEASES = ("1.29", "1.34")
"""The releases of Kubernetes whose schemas must take each manifest; the package `kubernetes-validate` has them."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
Labels = dict[str, Label]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Duration = Annotated[str, Meta(pattern=r"^([0-9]+(ms|s|m|h|d))+$")]


class Strict(Struct, forbid_unknown_fields=True, rename="camel"):
    """Nothing else fits."""


class Metadata(Strict):
    name: Name
    labels: Labels
    namespace: Name = "default"


class TargetName(Strict):
    name: Name


class MetricsApi(Strict):
    url: Annotated[str, Meta(pattern=r"^http://[a-z0-9.-]+:[0-9]+/[!-~]*$")]
    value_location: str
    target_value: Annotated[str, Meta(pattern="^[0-9]+$")]
    activation_target_value: Annotated[str, Meta(pattern="^[0-9]+$")]


class Trigger(Strict):
    type: Literal["metrics-api"]
    metric_type: Literal["AverageValue"]
    metadata: MetricsApi


class ScaleDown(Strict):
    stabilization_window_seconds: Natural


class Behavior(Strict):
    scale_down: ScaleDown


class AutoscalerConfig(Strict):
    behavior: Behavior


class Advanced(Strict):
    horizontal_pod_autoscaler_config: AutoscalerConfig


class ScaledSpec(Strict):
    scale_target_ref: TargetName
    polling_interval: Positive
    cooldown_period: Natural
    min_replica_count: Natural
    max_replica_count: Positive
    advanced: Advanced
    triggers: Annotated[list[Trigger], Meta(min_length=1)]


class ScaledObject(Strict, tag_field="kind", tag="ScaledObject"):
    api_version: Literal["keda.sh/v1alpha1"]
    metadata: Metadata
    spec: ScaledSpec


class Selector(Strict):
    match_labels: Labels


class Endpoint(Strict):
    port: str
    path: str
    interval: Duration


class MonitorSpec(Strict):
    selector: Selector
    job_label: str
    endpoints: Annotated[list[Endpoint], Meta(min_length=1)]


class ServiceMonitor(Strict, tag_field="kind", tag="ServiceMonitor"):
    api_version: Literal["monitoring.coreos.com/v1"]
    metadata: Metadata
    spec: MonitorSpec


class Rule(Struct, forbid_unknown_fields=True):
    expr: str
    record: str = ""
    alert: str = ""
    for_: Duration = msgspec.field(name="for", default="0s")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(Strict):
    name: str
    rules: Annotated[list[Rule], Meta(min_length=1)]


class RuleSpec(Strict):
    groups: Annotated[list[RuleGroup], Meta(min_length=1)]


class PrometheusRule(Strict, tag_field="kind", tag="PrometheusRule"):
    api_version: Literal["monitoring.coreos.com/v1"]
    metadata: Metadata
    spec: RuleSpec


@cache
def _get_validator(version: str, kind: str, api_version: str) -> Any:
    """Return what checks one kind of object of a version of Kubernetes, and knows each of its fields."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, number = api_version.rpartition("/")
    name = f"{kind.lower()}-{'-'.join(filter(None, (group.partition('.')[0], number)))}.json"
    definitions: Any = Resource.from_contents(_read(f"{folder}/_definitions.json"))
    schema = _read(f"{folder}/{name}")
    empty: Registry[Any] = Registry()
    registry: Any = definitions @ (Resource.from_contents(schema) @ empty)
    return Draft202012Validator(schema, registry=registry)


@cache
def _read(file: str) -> Any:
    return json.loads((files("kubernetes_validate") / file).read_text())


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raise an error for a manifest that Kubernetes, KEDA or Prometheus' operator would refuse."""
    kind, version = manifest["kind"], manifest["apiVersion"]
    if version.startswith(("keda.sh/", "monitoring.coreos.com/")):
        msgspec.convert(manifest, ScaledObject | ServiceMonitor | PrometheusRule)
        return
    for release in RELEASES:
        _get_validator(release, kind, version).validate(manifest)
    metadata: dict[str, Any] = {"labels": {}, **manifest["metadata"]}
    msgspec.convert({key: metadata[key] for key in ("name", "labels")}, Metadata)
