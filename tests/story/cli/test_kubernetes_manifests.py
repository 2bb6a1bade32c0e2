"""Manifests for Kubernetes, by `celery5 kubernetes manifests`: each as its API takes it."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from celery5.protocol.cluster.manifests import COPY_KEYS, FOLDER
from celery5.protocol.cluster.pods import STATUS_PORT
from tests.pure.cluster.kubernetes_schemas import check_manifest
from tests.story.cli.commands import Ended, celery5

Manifest = dict[str, Any]
SHOP = """
from celery5 import App
app = App("shop", autoscale={"minimum": 1, "maximum": 9})
tea = App("kiosk")
@app.task
async def mail() -> None: ...
@app.task(queue="bulk$(x)")
async def bulk() -> None: ...
"""
CLUSTER = """
hung_after = 45
[environment]
TZ = "UTC"
NAME = "$(HOSTNAME) {{ x }}"
[routers.default]
[schedulers.default]
[publishers.default]
[workers.mail]
count = 2
queues = ["default", "bulk$(x)"]
grace_period = 20
max_memory = "400 MiB"
status_port = 9000
[workers.Big_Jobs]
"""
ALL = (
    *("--keys-secret", "shop-keys", "--broker-secret", "shop-redis", "--namespace", "web"),
    *("--dashboard-secret", "shop-tokens", "--monitoring"),
)


_RENDERED: dict[object, Ended] = {}


def render(folder: Path, *flags: str, cluster: str = CLUSTER, target: str = "shop:app") -> Ended:
    (folder / "shop.py").write_text(SHOP)
    (folder / "cluster.toml").write_text(cluster)
    words = ("-A", target, "kubernetes", "manifests", "--image", "registry/shop:1", *flags)
    if "--output" in flags:
        return celery5(*words, cwd=folder)
    if (found := _RENDERED.get((words, cluster))) is None:  # it is the same for all tests
        found = _RENDERED[words, cluster] = celery5(*words, cwd=folder)
    return found


def rendered(folder: Path, *flags: str, **options: str) -> list[Manifest]:
    ended = render(folder, *flags, **options)
    assert (ended.code, ended.err) == (0, "")
    return list(yaml.safe_load_all(ended.out))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pod_of(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


def container_of(deployment: Manifest) -> Manifest:
    (container,) = pod_of(deployment)["containers"]
    return dict(container)


@pytest.mark.parametrize(
    "flags", [(), ("--scale", "keda"), ("--scale", "cpu"), ("--controller",)], ids=" ".join
)
def test_each_manifest_is_as_its_api_takes_it(tmp_path: Path, flags: tuple[str, ...]) -> None:
    manifests = rendered(tmp_path, *flags, *ALL)
    for manifest in manifests:
        check_manifest(manifest)
        assert manifest["metadata"]["namespace"] == "web"
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names)


def test_a_wrong_field_is_found(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, "--scale", "keda")
    deployment = next(iter(of_kind(manifests, "Deployment").values()))
    container_of(deployment)
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(Exception, match="livenesProbe"):
        check_manifest(deployment)
    scaled = next(iter(of_kind(manifests, "ScaledObject").values()))
    with pytest.raises(msgspec.ValidationError, match="lagCount"):
        check_manifest({**scaled, "spec": {**scaled["spec"], "lagCount": 5}})


def test_each_field_that_no_manifest_has_is_named_in_one_line(tmp_path: Path) -> None:
    ended = render(tmp_path, "--broker-secret", "shop-redis", cluster="[broker]\n[workers.default]\n")
    assert ended.code == 0
    assert ended.error.startswith("Warning: [broker] is left out")
    assert "the Secret 'shop-redis', entry 'url'" in ended.error
    rest = (
        'platform = "processes"\nrestart_limit = 3\ncanary = 60\n[hosts.a]\n[workers.default]\nhosts = ["a"]\n'
        'queues = ["default"]\n'
    )
    lines = render(tmp_path, cluster=rest).err.splitlines()
    assert [line.partition(" left out")[0].partition(" read")[0] for line in lines] == [
        *("Warning: [hosts] is", "Warning: platform = 'processes' is", "Warning: no workers"),
        *("Warning: restart_limit", "Warning: canary is"),
    ]
    assert "no workers read bulk$(x)" in lines[2]


def test_each_group_is_a_deployment_whose_pods_answer_probes_and_end_in_order(tmp_path: Path) -> None:
    manifests = rendered(tmp_path)
    found = of_kind(manifests, "Deployment")
    plain = {"shop-router-default", "shop-scheduler-default", "shop-publisher-default", "shop-worker-mail"}
    (big,) = found.keys() - plain
    assert big.startswith("shop-worker-big-jobs-")
    mail = found["shop-worker-mail"]
    assert mail["spec"]["replicas"] == 2
    labels = mail["spec"]["template"]["metadata"]["labels"]
    assert mail["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pod_of(mail)["terminationGracePeriodSeconds"] == 20 + 50 + 15
    assert mail["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    one = container_of(mail)
    assert one["ports"][0]["containerPort"] == STATUS_PORT
    assert one["command"][-4:] == ["--status-host", "0.0.0.0", "--status-port", str(STATUS_PORT)]
    assert "9000" not in one["command"]
    probes = [one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness", "startup")]
    assert probes == ["/livez", "/readyz", "/livez"]
    assert one["livenessProbe"]["failureThreshold"] * one["livenessProbe"]["periodSeconds"] >= 45
    assert one["resources"]["limits"] == {"memory": "500Mi"}
    with_hook = [name for name, deployment in found.items() if "lifecycle" in container_of(deployment)]
    assert with_hook == ["shop-publisher-default"]
    assert set(of_kind(manifests, "PodDisruptionBudget")) == {"shop-worker-mail"}


@pytest.mark.parametrize("flags", [(), ("--controller",)])
def test_nothing_runs_as_root_or_may_become_it_and_no_secret_is_written_down(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    manifests = rendered(tmp_path, *flags, *ALL)
    pods = [pod_of(deployment) for deployment in of_kind(manifests, "Deployment").values()]
    pods += [manifest["template"]["spec"] for manifest in of_kind(manifests, "PodTemplate").values()]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is ("serviceAccountName" in pod)
        for container in (*pod["containers"], *pod["initContainers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        (broker,) = [variable for variable in container["env"] if variable["name"] == "CELERY5_BROKER"]
        assert broker["valueFrom"]["secretKeyRef"] == {"name": "shop-redis", "key": "url"}


def test_keda_scales_by_the_workers_that_the_queues_of_each_group_want(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, "--scale", "keda", "--namespace", "web")
    scaled = of_kind(manifests, "ScaledObject")
    urls = {name: manifest["spec"]["triggers"][0]["metadata"]["url"] for name, manifest in scaled.items()}
    (big,) = urls.keys() - {"shop-worker-mail"}
    assert set(urls.values()) == {
        "http://shop-scheduler.web.svc:9500/wanted-workers/default,bulk%24%28x%29",
        "http://shop-scheduler.web.svc:9500/wanted-workers/bulk%24%28x%29,default",
    }, "every queue is watched"
    limits = {name: manifest["spec"]["maxReplicaCount"] for name, manifest in scaled.items()}
    assert limits == {"shop-worker-mail": 6, big: 3}, "together those of the application"
    deployments = of_kind(manifests, "Deployment")
    assert [name for name, manifest in deployments.items() if "replicas" not in manifest["spec"]] == list(
        scaled
    ), "else each `apply` would undo it"
    assert {manifest["spec"]["scaleTargetRef"]["name"] for manifest in scaled.values()} == set(scaled)
    service = of_kind(manifests, "Service")["shop-scheduler"]["spec"]["selector"]
    scheduler = deployments["shop-scheduler-default"]["spec"]["template"]["metadata"]["labels"]
    assert service.items() <= scheduler.items()


def test_the_only_group_has_as_many_workers_as_the_scheduler_decides(tmp_path: Path) -> None:
    cluster = "[schedulers.default]\n[workers.default]\n"
    (scaled,) = of_kind(rendered(tmp_path, "--scale", "keda", cluster=cluster), "ScaledObject").values()
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["url"] == "http://shop-scheduler.default.svc:9500/wanted-workers"


def test_workers_are_scaled_by_their_cpu(tmp_path: Path) -> None:
    scaled = of_kind(rendered(tmp_path, "--scale", "cpu", "--maximum", "12"), "HorizontalPodAutoscaler")
    limits = sorted(
        (manifest["spec"]["minReplicas"], manifest["spec"]["maxReplicas"]) for manifest in scaled.values()
    )
    assert limits == [(1, 4), (1, 8)]


@pytest.mark.parametrize("flags", [(), ("--controller",)])
def test_the_commands_of_pods_are_commands(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for deployment in of_kind(rendered(tmp_path, *flags, *ALL), "Deployment").values():
        first, *words = container_of(deployment)["command"]
        assert first == "celery5"
        if words[0] == "publisher" and celery5("publisher", "--help", cwd=tmp_path).code:
            continue
        asked = [word.replace("$(POD_NAME)", "a-1").replace("$$", "$") for word in words]
        assert celery5(*asked, "--help", cwd=tmp_path).code == 0, asked


def test_a_text_that_looks_like_a_kubernetes_variable_stays_unchanged(tmp_path: Path) -> None:
    one = container_of(of_kind(rendered(tmp_path), "Deployment")["shop-worker-mail"])
    assert "default,bulk$$(x)" in one["command"]
    assert "$(POD_NAME)" in one["command"]
    assert {variable["name"]: variable.get("value") for variable in one["env"]}[
        "NAME"
    ] == "$$(HOSTNAME) {{ x }}"


def test_a_controller_may_do_what_it_needs_and_reads_the_description(tmp_path: Path) -> None:
    manifests = rendered(tmp_path, "--controller", "--namespace", "web")
    description = of_kind(manifests, "ConfigMap")["shop-controller"]["data"]["cluster.toml"]
    assert description.startswith('platform = "kubernetes"\n')
    assert CLUSTER in description
    (role,) = of_kind(manifests, "Role").values()
    allowed = {(name, verb) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}
    assert ("secrets", "get") not in allowed
    assert {name for name, _ in allowed} == {"deployments", "pods", "podtemplates"}
    (deployment,) = of_kind(manifests, "Deployment").values()
    assert pod_of(deployment)["serviceAccountName"] == "shop-controller"
    assert of_kind(manifests, "PodTemplate").keys() == {"shop"}


@pytest.mark.parametrize(
    ("flags", "cluster", "error"),
    [
        (("--scale", "keda"), "[workers.a]\n", "--scale keda: a Scheduler decides"),
        (
            ("--scale", "keda", "--controller"),
            "[workers.a]\n",
            "--scale: a Controller scales its members itself",
        ),
        (
            ("--controller",),
            'platform = "systemd"\n[workers.a]\n',
            "platform is 'systemd' in the description",
        ),
        (("--controller",), "[broker]\n[workers.a]\n", "[broker] and [hosts] are for Controllers outside"),
        (("--maximum", "3"), "[workers.a]\n", "--maximum: nothing is scaled without --scale"),
        (("--as", "helm"), "[workers.a]\n", "--as helm: needs --output FOLDER"),
        (("--output", "x"), "[workers.a]\n", "--as yaml: takes no --output"),
        ((), "[workers.a]\ncuont = 2\n", "workers.a.cuont is not known; did you mean 'count'?"),
    ],
)
def test_manifests_that_cannot_be_made_are_refused_in_one_line(
    tmp_path: Path, flags: tuple[str, ...], cluster: str, error: str
) -> None:
    ended = render(tmp_path, *flags, cluster=cluster)
    assert ended.code == 2
    assert error in ended.error


def test_keda_needs_an_application_that_is_scaled(tmp_path: Path) -> None:
    ended = render(tmp_path, "--scale", "keda", target="shop:tea")
    assert ended.code == 2
    assert "--scale keda needs the setting autoscale" in ended.error


def test_keys_are_private_to_the_pod(tmp_path: Path) -> None:
    there, secret = tmp_path / "run", tmp_path / "secret"
    secret.mkdir()
    there.mkdir()
    for name in ("mine.pem", "trusted.pem"):
        (secret / name).write_text(name)
    command = COPY_KEYS.replace(FOLDER, str(there)).replace("/etc/celery5/keys", str(secret))
    subprocess.run(["sh", "-c", command], check=True, timeout=20)
    assert (there / "keys").stat().st_mode & 0o777 == 0o700
    assert (there / "keys" / "mine.pem").stat().st_mode & 0o777 == 0o600
    assert (there / "keys" / "trusted" / "cluster.pem").read_text() == "trusted.pem"


@pytest.mark.parametrize("flags", [("--scale", "keda"), ("--controller",)], ids=" ".join)
def test_the_chart_makes_the_same_manifests(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert render(tmp_path, *flags, *ALL, "--as", "helm", "--output", "chart").code == 0
    chart = yaml.safe_load((tmp_path / "chart" / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "shop")
    values = yaml.safe_load((tmp_path / "chart" / "values.yaml").read_text())
    made = [expand(file.read_text(), values) for file in (tmp_path / "chart" / "templates").iterdir()]
    wanted = rendered(tmp_path, *flags, *ALL)
    for manifest in wanted:
        del manifest["metadata"]["namespace"]

    def order(manifest: Manifest) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(made, key=order) == sorted(wanted, key=order)
    values["image"], values["broker"] = "registry/shop:2", "other"
    text = (tmp_path / "chart" / "templates" / ("deployment-shop-controller.yaml" if flags[0] == "--controller"
            else "deployment-shop-worker-mail.yaml")).read_text()  # fmt: skip
    assert container_of(expand(text, values))["image"] == "registry/shop:2"


def expand(template: str, values: Manifest) -> Manifest:
    """Return what Helm makes of a template: of the few expressions that ours have."""

    def evaluate(found: re.Match[str]) -> str:
        expression = found[1]
        if expression == ".Release.Namespace":
            return "web"
        if quoted := re.fullmatch(r'"([^"]*)"', expression):
            return quoted[1]
        if number := re.fullmatch(r'\(index \.Values\.groups "([^"]+)"\)\.(\w+)', expression):
            return str(values["groups"][number[1]][number[2]])
        name = re.fullmatch(r"\.Values\.(\w+) \| quote", expression)
        assert name, expression
        return f'"{values[name[1]]}"'

    manifest: Manifest = yaml.safe_load(re.sub(r"\{\{ (.*?) \}\}(?!\})", evaluate, template))
    return manifest


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here, which has kustomize")
def test_kustomize_takes_the_base(tmp_path: Path) -> None:
    assert render(tmp_path, "--scale", "keda", *ALL, "--as", "kustomize", "--output", "base").code == 0
    built = subprocess.run(
        ["kubectl", "kustomize", "base"], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in yaml.safe_load_all(built.stdout)}
    assert made == {
        (manifest["kind"], manifest["metadata"]["name"])
        for manifest in rendered(tmp_path, "--scale", "keda", *ALL)
    }
