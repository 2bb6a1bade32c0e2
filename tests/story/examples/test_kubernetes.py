"""The example for Kubernetes: its manifests are what the API takes, and the pods' commands are what celery5 takes."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from celery5.broker.keys import Keys
from celery5.examples.kubernetes.manifests import COPY_KEYS, FOLDER
from tests.pure.cluster.kubernetes_types import (
    Autoscaler,
    Budget,
    Container,
    Deployment,
    Manifests,
    ScaledObject,
)
from tests.story.cli.commands import Ended, celery5

COMMAND = (sys.executable, "-m", "celery5.examples.kubernetes")
SAID = ("--app", "shop.main:app", "--name", "shop", "--queues", "default", "--image", "registry/shop:1")
KIOSK = """
from celery5 import App

tea = App("kiosk")

@tea.task(queue="slow")
async def brew() -> None: ...

@tea.task
async def serve() -> None: ...
"""
CLUSTER = """
hung_after = 45
[environment]
TZ = "UTC"
NAME = "$(HOSTNAME)"
[routers.default]
[schedulers.default]
[publishers.default]
[workers.mail]
count = 2
queues = ["mail", "bulk$(x)"]
grace_period = 20
max_memory = "400 MiB"
status_port = 9000
[workers.Big_Jobs]
"""


def render(folder: Path, *more: str, cluster: str = CLUSTER) -> Ended:
    (folder / "cluster.toml").write_text(cluster)
    return celery5("cluster.toml", *SAID, *more, cwd=folder, command=COMMAND)


def rendered(folder: Path, *more: str) -> list[Deployment | Budget | Autoscaler | ScaledObject]:
    ended = render(folder, *more)
    assert ended.err == ""
    return msgspec.json.decode(ended.out.encode(), type=Manifests).items


def deployments(folder: Path, *more: str) -> dict[str, Deployment]:
    return {
        deployment.metadata.name: deployment
        for deployment in rendered(folder, *more)
        if isinstance(deployment, Deployment)
    }


def container(deployment: Deployment) -> Container:
    (one,) = deployment.spec.template.spec.containers
    return one


def test_what_no_manifest_has_is_named_in_one_line_each(tmp_path: Path) -> None:
    ended = render(tmp_path, "--broker", "shop-redis", cluster="[broker]\n[workers.default]\n")
    assert ended.code == 0
    assert ended.error.startswith("Warning: [broker] is left out")
    assert "the Secret 'shop-redis', entry 'url'" in ended.error
    assert msgspec.json.decode(ended.out.encode(), type=Manifests).items
    rest = 'platform = "processes"\nrestart_limit = 3\ncanary = 60\n[hosts.a]\n[workers.default]\nhosts = ["a"]\n'
    lines = render(tmp_path, cluster=rest).err.splitlines()
    assert [line.partition(" left out")[0] for line in lines] == [
        *(
            "Warning: [hosts] is",
            "Warning: platform = 'processes' is",
            "Warning: restart_limit",
            "Warning: canary is",
        ),
    ]


def test_each_group_is_a_deployment_whose_pods_answer_probes_and_end_in_order(tmp_path: Path) -> None:
    found = deployments(tmp_path)
    assert set(found) == {
        *("shop-router-default", "shop-scheduler-default", "shop-publisher-default"),
        *("shop-worker-mail", "shop-worker-big-jobs"),
    }
    mail = found["shop-worker-mail"]
    assert mail.spec.replicas == 2
    assert mail.spec.selector.match_labels.items() <= mail.spec.template.metadata.labels.items()
    assert mail.spec.template.spec.termination_grace_period_seconds == 20 + 50 + 15
    one = container(mail)
    port = one.ports[0].container_port
    assert (one.ports[0].name, one.args[-2:]) == ("status", ["--status-port", str(port)])
    probes = [one.liveness_probe, one.readiness_probe, one.startup_probe]
    assert [probe.http_get.path for probe in probes if probe] == ["/livez", "/readyz", "/livez"]
    assert one.liveness_probe is not None
    assert one.liveness_probe.failure_threshold * one.liveness_probe.period_seconds >= 45
    assert one.resources is not None
    assert one.resources.limits == {"memory": "500Mi"}
    assert [name for name, deployment in found.items() if container(deployment).lifecycle] == [
        "shop-publisher-default"
    ]


def test_nothing_runs_as_root_or_may_become_it_and_no_secret_is_written_down(tmp_path: Path) -> None:
    for deployment in deployments(tmp_path, "--keys", "shop-keys").values():
        pod = deployment.spec.template.spec
        assert pod.security_context.run_as_non_root
        assert not pod.automount_service_account_token
        for pod_container in (*pod.containers, *pod.init_containers):
            assert pod_container.security_context.read_only_root_filesystem
            assert not pod_container.security_context.allow_privilege_escalation
            mounted = {mount.name for mount in pod_container.volume_mounts}
            assert mounted <= {volume.name for volume in pod.volumes}
        (broker,) = [variable for variable in container(deployment).env if variable.name == "CELERY5_BROKER"]
        assert broker.value is None
        assert broker.value_from is not None
        assert broker.value_from.secret_key_ref is not None
        assert broker.value_from.secret_key_ref.name == "celery5-broker"


def test_workers_are_scaled_by_their_cpu_or_by_what_waits_on_their_queues(tmp_path: Path) -> None:
    by_cpu = [
        autoscaler for autoscaler in rendered(tmp_path, "--most", "9") if isinstance(autoscaler, Autoscaler)
    ]
    assert [(autoscaler.spec.min_replicas, autoscaler.spec.max_replicas) for autoscaler in by_cpu] == [
        (2, 9),
        (1, 9),
    ]
    found = rendered(tmp_path, "--most", "9", "--keda", "redis.default.svc:6379")
    scaled = [scaled_object for scaled_object in found if isinstance(scaled_object, ScaledObject)]
    assert not [autoscaler for autoscaler in found if isinstance(autoscaler, Autoscaler)]
    streams = [trigger.metadata.stream for trigger in scaled[0].spec.triggers]
    assert streams == [Keys("shop").for_queue(queue).normal for queue in ("mail", "bulk$(x)")]
    workers = [
        deployment
        for deployment in found
        if isinstance(deployment, Deployment) and "worker" in deployment.metadata.name
    ]
    assert [worker.spec.replicas for worker in workers] == [None, None], "else each `apply` would undo it"
    assert {scaled_object.spec.scale_target_ref.name for scaled_object in scaled} == {
        worker.metadata.name for worker in workers
    }


def test_name_and_queues_are_those_of_the_application(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(KIOSK)
    (tmp_path / "cluster.toml").write_text("[workers.a]\n[workers.b]\nqueues = ['mail']\n")
    words = ("cluster.toml", "--app", "main:tea", "--image", "i", "--most", "9", "--keda", "redis:6379")
    ended = celery5(*words, cwd=tmp_path, command=COMMAND)
    assert ended.err == ""
    found = msgspec.json.decode(ended.out.encode(), type=Manifests).items
    scaled = {
        scaled_object.metadata.name: scaled_object
        for scaled_object in found
        if isinstance(scaled_object, ScaledObject)
    }
    streams = {
        name: [trigger.metadata.stream for trigger in scaled_object.spec.triggers]
        for name, scaled_object in scaled.items()
    }
    keys = Keys("kiosk")
    assert streams == {
        "kiosk-worker-a": [keys.for_queue(queue).normal for queue in ("default", "slow")],
        "kiosk-worker-b": [keys.for_queue("mail").normal],
    }


@pytest.mark.parametrize("words", [(), ("--name", "shop"), ("--queues", "default")])
def test_an_application_that_is_not_here_is_told_of_in_one_line(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    more = ("cluster.toml", "--app", "no_such.main:app", "--image", "i", *words)
    ended = celery5(*more, cwd=tmp_path, command=COMMAND)
    assert ended.code == 1
    assert ended.error.startswith("Error: application no_such.main:app: No module named 'no_such")
    assert ended.error.endswith("; or give --name and --queues")


def test_the_commands_of_pods_are_commands(tmp_path: Path) -> None:
    for deployment in deployments(tmp_path).values():
        first, *words = container(deployment).args
        assert first == "celery5"
        if words[0] == "publisher" and celery5("publisher", "--help", cwd=tmp_path).code:
            continue
        asked = [word.replace("$(POD_NAME)", "a-1").replace("$$", "$") for word in words]
        assert celery5(*asked, "--help", cwd=tmp_path).code == 0, asked


def test_what_kubernetes_would_take_for_a_variable_is_left_as_it_is(tmp_path: Path) -> None:
    one = container(deployments(tmp_path)["shop-worker-mail"])
    assert "mail,bulk$$(x)" in one.args
    assert {variable.name: variable.value for variable in one.env}["NAME"] == "$$(HOSTNAME)"


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


def test_a_wrong_description_is_told_of_in_one_line(tmp_path: Path) -> None:
    ended = render(tmp_path, cluster="[workers.a]\ncuont = 2\n")
    assert ended.code == 1
    assert ended.error == (
        "Error: cluster description cluster.toml: workers.a.cuont is not known; did you mean 'count'?"
    )


def test_the_types_are_strict(tmp_path: Path) -> None:
    said = json.loads(render(tmp_path).out)
    said["items"][0]["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(msgspec.ValidationError, match="livenesProbe"):
        msgspec.convert(said, Manifests)
