"""The page for those on call: each command that it shows prints, in the state that it is for, what the page says."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cli.commands import Ended, Serving, celery5, until
from tests.story.cluster.controlling import Controlling

PAGE = Path(__file__).parents[3] / "docs/guide/on-call.md"
MOST_WORDS = 900
SHOP = """
from celery5 import App

app = App("shop")


@app.task(queue="mail", max_retries=0)
async def send_receipt(order: int) -> None:
    raise ConnectionError("smtp refused")


@app.task
async def charge(order: int) -> None: ...


@app.task(schedule=3600.0)
async def tick() -> None: ...
"""


class Shop:
    """The application of the page, in a folder and on a server of the test's own."""

    def __init__(self, folder: Path, server: EmbeddedServer) -> None:
        self.folder = folder
        self.server = server
        self.env = {"CELERY5_APP": "shop", "CELERY5_BROKER": server.url, "COLUMNS": "300"}

    def run(self, line: str) -> Ended:
        """Run a command as the page writes it."""
        name, *words = line.split()
        assert name == "celery5"
        return celery5(*words, cwd=self.folder, env=self.env)

    def send(self, task: str, order: int) -> None:
        assert self.run(f"celery5 task send {task} --args [{order}]").code == 0

    def work(self) -> None:
        """Run what there is to do."""
        assert self.run("celery5 worker start --burst").code == 0

    def set_memory(self, limit: str) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            client.config_set("maxmemory", limit)


@pytest.fixture
def shop(tmp_path: Path, own_server: EmbeddedServer) -> Shop:
    (tmp_path / "shop.py").write_text(SHOP)
    return Shop(tmp_path, own_server)


def like(pattern: str) -> re.Pattern[str]:
    """A line of the page: `...` is anything, and columns may be as wide as they are."""
    words = (re.escape(word).replace(r"\.\.\.", ".*") for word in pattern.split())
    return re.compile(r"\s*" + r"\s*".join(words) + r"\s*")


def check(shop: Shop, command: str, samples: list[str]) -> None:
    """Run a command until it prints lines that look like these."""

    def prints() -> bool:
        ended = shop.run(command)
        printed.append(ended)
        lines = [*ended.out.splitlines(), *ended.err.splitlines()]
        return all(any(like(sample).fullmatch(line) for line in lines) for sample in samples)

    printed: list[Ended] = []
    try:
        until(prints)
    except AssertionError:
        pytest.fail(f"{command} printed\n{printed[-1].out}\n{printed[-1].err}\nand not {samples}")


def read_symptoms() -> dict[str, tuple[str, str]]:
    """Return the command and the line of each symptom of the page."""
    found = re.findall(r"(?m)^\| ([^|]+) \| `(celery5 [^`]+)`<br>`([^`]+)` \|", PAGE.read_text())
    return {symptom: (command, sample) for symptom, command, sample in found}


def read_first() -> list[tuple[str, list[str]]]:
    """Return the commands to run first, and the lines that they print."""
    (block,) = re.findall(r"(?ms)^```console\n(.*?)^```", PAGE.read_text())
    return [
        (lines[0], lines[1:]) for part in block.split("$ ")[1:] if (lines := part.strip("\n").splitlines())
    ]


def fail_jobs(shop: Shop) -> Iterator[None]:
    for order in (7, 14):
        shop.send("shop.send_receipt", order)
    shop.send("shop.charge", 1)
    shop.work()
    yield


def run_jobs(shop: Shop) -> Iterator[None]:
    shop.env["CELERY5_METRICS_INTERVAL"] = "1"
    with Serving("worker", "start", cwd=shop.folder, env=shop.env).ready():
        shop.send("shop.charge", 1)
        yield


def let_jobs_wait(shop: Shop) -> Iterator[None]:
    shop.send("shop.charge", 1)
    yield


def lose_a_worker(shop: Shop) -> Iterator[None]:
    with Serving("worker", "start", "--name", "web1", cwd=shop.folder, env=shop.env).ready() as worker:
        worker.signal(signal.SIGKILL)
        worker.ended()
    yield


def give_up_a_member(shop: Shop) -> Iterator[None]:
    broken = "restart_limit = 2\n[workers.broken]\nenvironment = { PYTHONHOME = '/nowhere' }\n"
    with Controlling(shop.folder, broken, env=shop.env) as controller:
        until(lambda: controller.logged("member:abandoned"))
        yield


def run_a_cluster(shop: Shop) -> Iterator[None]:
    with Controlling(shop.folder, "[workers.default]\n", env=shop.env).up():
        yield


def stop_redis(shop: Shop) -> Iterator[None]:
    shop.env["CELERY5_BROKER"] = f"unix://{shop.folder}/nobody"
    yield


def fill_redis(shop: Shop) -> Iterator[None]:
    shop.set_memory("1mb")
    yield
    shop.set_memory("0")


def take_a_wrong_password(shop: Shop) -> Iterator[None]:
    shop.env["CELERY5_BROKER"] = shop.server.url.replace("unix://", "unix://shop-worker:wrong@", 1)
    yield


def pause_a_queue(shop: Shop) -> Iterator[None]:
    with Serving("worker", "start", cwd=shop.folder, env=shop.env).ready():
        assert shop.run("celery5 queue pause mail").code == 0
        yield


def miss_a_schedule(shop: Shop) -> Iterator[None]:
    with Serving("scheduler", "start", cwd=shop.folder, env=shop.env) as scheduler:
        until(lambda: scheduler.logged("scheduler:started"))
    yield


STATES: dict[str, Callable[[Shop], Iterator[None]]] = {
    "jobs wait": let_jobs_wait,
    "jobs fail": fail_jobs,
    "jobs are slow": run_jobs,
    "a worker was lost": lose_a_worker,
    "a member was given up": give_up_a_member,
    "Redis is down": stop_redis,
    "Redis is full": fill_redis,
    "a wrong or changed password": take_a_wrong_password,
    "a queue is paused": pause_a_queue,
    "a schedule was missed": miss_a_schedule,
    "dead jobs pile up": fail_jobs,
    "a deploy went wrong": run_a_cluster,
}
"""What brings the application into the state of each symptom."""


def test_the_page_has_each_symptom_and_is_short() -> None:
    assert read_symptoms().keys() == STATES.keys()
    assert len(PAGE.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("symptom", STATES)
def test_the_command_of_a_symptom_prints_what_the_page_shows(shop: Shop, symptom: str) -> None:
    command, sample = read_symptoms()[symptom]
    state = STATES[symptom](shop)
    next(state)
    try:
        check(shop, command, [sample])
    finally:
        next(state, None)


def test_the_three_commands_to_run_first_print_what_the_page_shows(shop: Shop) -> None:
    for _ in fail_jobs(shop):
        for order in (1, 2, 3):
            shop.send("shop.send_receipt", order)
        first = read_first()
        assert len(first) == 3
        for command, samples in first:
            check(shop, command, samples)
