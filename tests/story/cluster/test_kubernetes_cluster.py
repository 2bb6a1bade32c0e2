"""A cluster on Kubernetes: a real Controller, whose members are real processes behind an API server for tests."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from celery5 import App
from celery5.cli.terminal.loading import load_app
from celery5.protocol.cluster.pods import to_name
from tests.night import NIGHTLY
from tests.story.cluster.controlling import Controlling, until
from tests.story.cluster.test_autoscaled_cluster import STALL
from tests.story.conftest import fresh_modules
from tests.trio.cluster.kubernetes_there import NAMESPACE, Kubernetes, Manifest, Node, kubernetes

pytestmark = pytest.mark.timeout(300)

CLUSTER = """
platform = "kubernetes"
[schedulers.default]
[workers.default]
"""

__all__ = ["fresh_modules"]


class Machine:
    """A cluster of Kubernetes in a thread, with one node."""

    def __init__(self, environment: dict[str, str], template: Manifest) -> None:
        self._environment, self._template = environment, template
        self._ready, self._over = threading.Event(), trio.Event()
        self.cluster: Kubernetes
        self.node: Node
        self._token: trio.lowlevel.TrioToken
        self._thread = threading.Thread(target=lambda: trio.run(self._run))
        self._thread.start()
        assert self._ready.wait(20)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with kubernetes() as self.cluster:
            self.node = Node(self.cluster, self._environment)
            self.cluster.create("podtemplates", self._template)
            self._ready.set()
            await self._over.wait()

    def set_image(self, image: str) -> None:
        """Apply a template with another image, as `kubectl apply` does."""

        def change() -> None:
            template = self.cluster.objects["podtemplates", self._template["metadata"]["name"]]
            template["template"]["spec"]["containers"][0]["image"] = image
            self.cluster.store("MODIFIED", "podtemplates", template)

        trio.from_thread.run_sync(change, trio_token=self._token)

    def images(self) -> set[str]:
        """The images of all pods."""
        pods = trio.from_thread.run_sync(self.cluster.pods, trio_token=self._token)
        return {pod["spec"]["containers"][0]["image"] for pod in pods}

    def workers(self) -> list[str]:
        """The Deployments of workers that have a replica."""
        objects = trio.from_thread.run_sync(lambda: dict(self.cluster.objects), trio_token=self._token)
        return sorted(
            item["metadata"]["annotations"]["celery5/member"]
            for (kind, _), item in objects.items()
            if kind == "deployments"
            and item["spec"]["replicas"]
            and item["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
        )

    def close(self) -> None:
        """End everything."""
        self._token.run_sync_soon(self._over.set)
        self._thread.join(30)


@contextmanager
def machine_in(folder: Path, app: App) -> Generator[Machine]:
    """A cluster of Kubernetes, and a kubeconfig for it in the folder."""
    container = {"name": "celery5", "image": "registry/stall:1"}
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": to_name(app.name)},
        "template": {"spec": {"containers": [container]}},
    }
    machine = Machine({"CELERY5_KEYS": os.environ.get("CELERY5_KEYS", "")}, template)
    (folder / "kubeconfig").write_text(
        f"""
        current-context: here
        contexts: [{{name: here, context: {{cluster: c, user: u, namespace: {NAMESPACE}}}}}]
        clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{machine.cluster.port}"}}}}]
        users: [{{name: u, user: {{token: {machine.cluster.token}}}}}]
        """
    )
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture
def stall(
    tmp_path: Path, app_name: str, url: str, fresh_modules: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An application that is scaled between one and three workers, in its own folder."""
    (tmp_path / "stall.py").write_text(STALL.format(name=app_name, url=url))
    monkeypatch.chdir(tmp_path)
    app = load_app("stall")
    yield app
    app.close()


def read_done() -> Counter[str]:
    """How often each job has run to its end."""
    return Counter(line.split()[0] for line in Path("done").read_text().splitlines())


def test_a_new_image_replaces_members_and_cuts_no_running_job(stall: App, tmp_path: Path) -> None:
    environment = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    description = CLUSTER.replace("[schedulers.default]", "")
    with (
        machine_in(tmp_path, stall) as machine,
        Controlling(tmp_path, description, target="stall", env=environment) as controller,
    ):
        controller.up()
        assert machine.workers() == ["worker-default-1"]
        squeeze = stall.tasks["stall.squeeze"]
        results = [squeeze.delay(number, 0.5) for number in range(12)]
        machine.set_image("registry/stall:2")
        assert controller.tell("restart", "--wait", "60").code == 0
        assert machine.images() == {"registry/stall:2"}
        until(lambda: controller.members()["worker-default-1"]["status"].startswith("ready; "))
        assert [result.get(timeout=60) for result in results] == list(range(12))
        assert read_done() == Counter({str(number): 1 for number in range(12)})


@pytest.mark.skipif(not NIGHTLY, reason="takes 20 seconds; nox -s nightly runs it")
def test_members_are_scaled_and_kept_and_no_running_job_is_cut(stall: App, tmp_path: Path) -> None:
    environment = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    with machine_in(tmp_path, stall) as machine:
        squeeze = stall.tasks["stall.squeeze"]
        with Controlling(tmp_path, CLUSTER, target="stall", env=environment) as first:
            first.up()
            results = [squeeze.delay(number, 0.5) for number in range(50)]
            until(lambda: len(machine.workers()) >= 2)
            pods = set(machine.node.processes)
            first.process.terminate()
            assert first.process.wait(60) == 0
        assert machine.workers(), "members outlive their Controller"
        with Controlling(tmp_path, CLUSTER, target="stall", env=environment) as second:
            second.up()
            results += [squeeze.delay(number, 0.5) for number in range(50, 60)]
            assert [result.get(timeout=60) for result in results] == list(range(60))
            until(lambda: machine.workers() == ["worker-default-1"])
            until(lambda: len(machine.cluster.pods()) == 2)
            assert {pod["metadata"]["name"] for pod in machine.cluster.pods()} <= pods, "they were adopted"
        assert read_done() == Counter({str(number): 1 for number in range(60)})
        assert 128 + signal.SIGKILL not in machine.node.exits.values()
