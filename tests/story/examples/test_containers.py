"""The example for containers: what its image and its services run works as a user without rights, and read-only.

No image is built here. The entry point, the variables and the health check are read from the `Dockerfile`, and the
commands from `compose.yaml`; they run as the first process of a namespace whose file systems cannot be written but for
the volume and `/tmp`, as Docker would run them.
"""

import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery5 import App, AsyncResult, JobState
from celery5.cli.main import cli
from celery5.protocol.cluster.description import STOP_MARGIN, build_members, parse_cluster
from celery5.protocol.cluster.members import KINDS
from tests.house.sources import HERE
from tests.story.cli.commands import COMMAND, LIMIT, celery5, environment, until

FOLDER = HERE / "examples" / "containers"
yaml: Any = importlib.import_module("yaml")  # it has no types
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if name != "server"}
DOCKER_STOP = 10.0
"""Seconds that `docker stop` waits before it kills."""
BOX = """
set -e
mount --bind "$VOLUME" "$VOLUME"
mount --bind "$FOLDER" "$FOLDER"
mount -o remount,bind,ro "$FOLDER"
mount -o remount,bind,ro /
exec unshare --user --map-user=10001 --map-group=10001 -- "$@"
"""
"""Makes all but the volume read-only, and the command a user without rights, in this namespace alone."""
NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
SHOP = """
import os
import trio
from celery5 import App

app = App({name!r})

@app.task
async def who() -> tuple[int, int, str]:
    try:
        open("written", "w").close()
        wrote = "written"
    except OSError as error:
        wrote = os.strerror(error.errno)
    return os.getuid(), os.getpid(), wrote

@app.task
async def long() -> None:
    await trio.sleep(60)
"""


def read_instructions(stage: int = -1) -> list[tuple[str, str]]:
    """Return the instructions of one stage of the Dockerfile, in order, lines that continue joined."""
    text = re.sub(r"(?m)^#.*\n", "", (FOLDER / "Dockerfile").read_text())
    stages = re.split(r"(?m)^(?=FROM )", re.sub(r"\\\n\s*", "", text))
    lines = [line for line in stages[stage].splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


INSTRUCTIONS = dict(read_instructions())
VARIABLES = dict(word.split("=", 1) for word in shlex.split(INSTRUCTIONS["ENV"]))


def test_the_image_is_slim_and_of_a_user_without_rights() -> None:
    words = [word for word, _ in read_instructions()]
    assert INSTRUCTIONS["FROM"] == "python:${PYTHON}-slim"
    assert re.fullmatch(r"(\d+):\1", INSTRUCTIONS["USER"])
    assert words.index("RUN") < words.index("USER"), "all that runs later runs as that user"
    assert "RUN" not in words[words.index("USER") :]
    assert INSTRUCTIONS["STOPSIGNAL"] == "SIGTERM"
    assert VARIABLES["XDG_STATE_HOME"] == INSTRUCTIONS["VOLUME"] == "/var/lib/celery5"


def test_the_image_is_made_of_the_wheel_of_this_repository() -> None:
    copied = [rest for word, rest in read_instructions(1) if word == "COPY"]
    assert copied == [". ."]
    assert [rest for word, rest in read_instructions() if word == "COPY"] == [
        "--from=build /opt/celery5 /opt/celery5"
    ]
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split("\n")
    needed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    links = {path.name for path in (HERE / "celery5").iterdir() if path.is_symlink()}
    assert needed == {"celery5", "pyproject.toml", "README.md", "LICENSE"} | links
    assert [name for name in needed if not (HERE / name).exists()] == []


def test_no_command_of_the_image_needs_a_shell_and_each_exists() -> None:
    assert json.loads(INSTRUCTIONS["ENTRYPOINT"]) == ["celery5"]
    options, _, health = INSTRUCTIONS["HEALTHCHECK"].partition(" CMD ")
    assert "--start-period" in options
    assert json.loads(health)[0] == "celery5"
    commands = [json.loads(INSTRUCTIONS["CMD"]), json.loads(health)[1:]]
    commands += [service["command"] for service in OURS.values()]
    for words in commands:
        cli.main([*words, "--help"], standalone_mode=False)


def test_services_are_read_only_and_without_rights() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
    for service in OURS.values():
        assert service["tmpfs"] == ["/tmp"]
        assert service["build"] == {"context": "../..", "dockerfile": "examples/containers/Dockerfile"}
        assert "state:/var/lib/celery5" in service["volumes"]
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports), "nothing is open to other hosts"


def test_the_server_keeps_jobs_and_evicts_none() -> None:
    words = COMPOSE["services"]["server"]["command"]
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")


def test_platforms_wait_longer_than_celery5_needs_to_stop() -> None:
    assert float(VARIABLES["CELERY5_GRACE_PERIOD"]) + 5 <= DOCKER_STOP
    members = build_members(parse_cluster((FOLDER / "cluster.toml").read_bytes()))
    assert {member.kind for member in members} == {"worker", "router", "scheduler"}
    periods = {"2m": 120.0}
    without_jobs = len(KINDS) - 1  # they stop at once
    needed = 20 + STOP_MARGIN + without_jobs + 5
    assert "grace_period = 20" in (FOLDER / "cluster.toml").read_text()
    assert periods[COMPOSE["services"]["controller"]["stop_grace_period"]] >= needed


def test_the_image_of_a_django_project_in_the_guide_shares_keys_and_stops_in_time() -> None:
    page = (HERE / "docs" / "guide" / "containers.md").read_text()
    section = page.partition("## In your own image, with Django")[2].partition("\n## ")[0]
    dockerfile = re.search(r"(?s)```dockerfile.*?\n(.*?)```", section)
    compose = re.search(r"(?s)```yaml.*?\n(.*?)```", section)
    assert dockerfile is not None
    assert compose is not None
    variables = dict(re.findall(r"(\w+)=(\S+)", re.findall(r"(?m)^ENV (.*)$", dockerfile[1])[0]))
    services: dict[str, Any] = yaml.safe_load(compose[1])["services"]
    own = {name: service for name, service in services.items() if name != "redis"}
    assert {tuple(service["volumes"]) for service in own.values()} == {
        (f"state:{variables['XDG_STATE_HOME']}",)
    }
    assert f"VOLUME {variables['XDG_STATE_HOME']}\n" in dockerfile[1]
    commands = [json.loads(re.findall(r"(?m)^CMD (.*)$", dockerfile[1])[0])]
    commands += [service["command"] for service in own.values() if "manage.py" in service["command"]]
    for words in commands:
        assert words[:3] == ["python", "manage.py", "celery5"]
        cli.main([*words[3:], "--help"], standalone_mode=False)
    grace = App("shop").settings.grace_period
    assert services["worker"]["stop_grace_period"] == f"{grace + 5:.0f}s"


class Container:
    """A command of the image as Docker would run it: the first process, read-only, as a user without rights."""

    def __init__(self, folder: Path, volume: Path, words: list[str], **variables: str) -> None:
        self._output = volume / "output"
        box = ["sh", "-c", BOX, "sh"]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*NAMESPACE, *box, *COMMAND, *words],
                cwd=folder,
                env=environment(VOLUME=str(volume), FOLDER=str(folder), **variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._output.read_text()

    @property
    def first(self) -> int:
        """The first process of the namespace."""
        (pid,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(pid)

    def stop(self) -> float:
        """Stop it as `docker stop` does, and return how long that took."""
        began = time.monotonic()
        os.kill(self.first, signal.SIGTERM)
        assert self.process.wait(LIMIT) == 0, self.text
        return time.monotonic() - began


@contextmanager
def producer(name: str, url: str) -> Iterator[Callable[[str], AsyncResult[Any]]]:
    """Sends jobs of `shop` by their names, from outside of the container."""
    app = App(name, broker=url)

    def send(task: str) -> AsyncResult[Any]:
        async def body() -> Any: ...

        return app.task(name=f"shop.{task}")(body).delay()

    try:
        yield send
    finally:
        app.close()


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def start(app_name: str, url: str, tmp_path: Path, short_path: Path, free_port: int) -> Iterator[Any]:
    """Starts a command of the image, with the variables of the image but for paths, and waits until it is healthy."""
    denied = (
        subprocess.run(
            [*NAMESPACE, "unshare", "--user", "--map-user=10001", "--map-group=10001", "true"],
            capture_output=True,
            text=True,
            check=False,
        )
        if sys.platform == "linux"
        else None
    )
    if denied is None or denied.returncode:
        pytest.skip(f"no namespaces can be made here: {denied.stderr.strip() if denied else sys.platform}")
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "shop.py").write_text(SHOP.format(name=app_name))
    (folder / "cluster.toml").write_text((FOLDER / "cluster.toml").read_text())
    variables = {
        **VARIABLES,
        "PATH": os.environ["PATH"],
        "XDG_STATE_HOME": str(short_path),
        "TMPDIR": str(short_path),
        "CELERY5_APP": "shop",
        "CELERY5_BROKER": url,
        "CELERY5_STATUS_PORT": str(free_port),
    }
    health = json.loads(INSTRUCTIONS["HEALTHCHECK"].partition(" CMD ")[2])[1:]
    with ExitStack() as stack:

        def run(words: list[str], *, until_healthy: bool = True, **more: str) -> Container:
            container = Container(folder, short_path, words, **variables | more)
            stack.callback(container.process.wait, LIMIT)
            stack.callback(container.process.kill)
            if until_healthy:
                until(
                    lambda: (
                        container.process.poll() is not None
                        or celery5(*health, cwd=folder, env=variables).code == 0
                    )
                )
                assert container.process.poll() is None, container.text
            return container

        yield run


def test_the_image_runs_jobs_read_only_and_stops_before_docker_kills_it(
    start: Any, app_name: str, url: str, tmp_path: Path
) -> None:
    container = start(json.loads(INSTRUCTIONS["CMD"]))
    with producer(app_name, url) as send:
        uid, pid, wrote = send("who").get(timeout=LIMIT)
        assert (uid, wrote) == (10001, "Read-only file system")
        assert pid != 1, "the first process passes on signals, and waits for orphans"
        long = send("long")
        until(lambda: long.status() is JobState.EXECUTING)
        assert container.stop() < DOCKER_STOP
        assert long.status() is JobState.SENT, "it is back on its queue"


def test_the_controller_of_the_compose_file_runs_its_members_read_only(
    start: Any, app_name: str, url: str
) -> None:
    words = [word.replace("/etc/celery5/", "") for word in OURS["controller"]["command"]]
    container = start(words)
    with producer(app_name, url) as send:
        assert send("who").get(timeout=LIMIT)[0] == 10001
    assert container.stop() < LIMIT


def test_the_dashboard_of_the_compose_file_takes_tokens_from_the_volume(
    start: Any, short_path: Path, tmp_path: Path, free_port: int
) -> None:
    added = celery5("dashboard", "token", "anna", "--add-to", short_path / "tokens", cwd=tmp_path)
    assert added.code == 0, added
    words = [word.replace("/var/lib/celery5", str(short_path)) for word in OURS["dashboard"]["command"]]
    container = start([*words, "--port", str(free_port)], until_healthy=False)
    test = [word.replace("8555", str(free_port)) for word in OURS["dashboard"]["healthcheck"]["test"]]
    assert test[:2] == ["CMD", "python"]

    def is_healthy() -> bool:
        return subprocess.run([sys.executable, *test[2:]], capture_output=True, check=False).returncode == 0

    until(lambda: container.process.poll() is not None or is_healthy())
    assert container.process.poll() is None, container.text
    assert container.stop() < DOCKER_STOP


def test_a_controller_without_a_place_for_temporary_files_says_so_in_one_line(start: Any) -> None:
    words = ["controller", "start", "--cluster", "cluster.toml", "--log-level", "error"]
    container = start(words, until_healthy=False, TMPDIR="/nowhere")
    assert container.process.wait(LIMIT) == 2, container.text
    assert "Error: no temporary folder can be made" in container.text
    assert "Traceback" not in container.text
