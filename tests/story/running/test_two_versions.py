"""Two versions on one Redis: the last release and this code, as workers and producers, while jobs are in flight.

The other version is the last tag, or PREVIOUS where there is none, taken out of the repository's history. It runs with
the dependencies of this environment, in processes of its own. The workers are upgraded, and taken back, while jobs are
in flight, beside a Router and a Scheduler of the version that comes. `nox -s nemesis` sends more, and has each version
run alone what the other has sent.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.house.sources import HERE
from tests.night import NIGHTLY
from tests.story.cli.commands import Serving, environment, until

pytestmark = pytest.mark.timeout(300)

PREVIOUS = "f1ea7b7d"
"""The commit that stands for the last release until there is a tag: the last one of 25 November 2026.

It has all that this test sends, and is older than the hundreds of commits of the two days after it. The newest tag
takes its place.
"""
COUNT = 40 if NIGHTLY else 5
"""Jobs of each kind that one producer sends."""
ROUNDS = 3 if NIGHTLY else 1
SHOP = """
import os
import time

import celery5
import trio

from celery5 import App, current_job, every
from celery5.streams import StreamEvents
from celery5.workflows import Flow

app = App({name!r}, broker={url!r}, grace_period=20, lease=2.0, box_slots=1)
orders = app.stream("orders", dict, by=lambda order: order["customer"], partitions=4)


def note(*words: object) -> None:
    file = os.open("effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (" ".join(map(str, words)) + "\\n").encode())
    os.close(file)


with open(f"version-{{os.getpid()}}", "w") as file:
    file.write(celery5.__file__)


@app.task
async def plain(n: str) -> str:
    await trio.sleep(0.02)
    note("plain", n)
    return n


@app.task
def threaded(n: str) -> str:
    time.sleep(0.02)
    note("threaded", n)
    return n


@app.task(max_retries=3, backoff=0.3)
async def moody(n: str) -> tuple[str, int]:
    if current_job().attempt == 1:
        raise ConnectionError("not now")
    note("moody", n)
    return n, current_job().attempt


@app.task(limit=1)
async def limited(n: str) -> str:
    await trio.sleep(0.03)
    note("limited", n)
    return n


@app.task(boxed=True)
def boxed(n: str) -> str:
    note("boxed", n)
    return n


@app.event
class Ordered:
    n: str


@Ordered.subscribe
@app.task
async def hear(n: str) -> None:
    note("hear", n)


@app.task
async def tick() -> None:
    note("tick", current_job().id)


app.schedule(tick.s(), every(0.5), name="tick")


@app.task
async def approve(n: str, by: str) -> str:
    note("approve", n, by)
    return by


@app.workflow
def approval(flow: Flow, n: str) -> str:
    return flow.call(approve, n, flow.wait_for("answer", timeout=600))


@app.task
async def double(n: int) -> int:
    await trio.sleep(0.02)
    note("double", n)
    return 2 * n


@app.task
async def add_up(numbers: list[int]) -> int:
    note("add_up", sum(numbers))
    return sum(numbers)


@app.processor(orders)
async def each_once(events: StreamEvents[dict]) -> None:
    async for order in events.records():
        seen = await events.state.get(order["customer"], 0)
        events.state.set(order["customer"], seen + 1)
        events.job(tell.s(f"{{order['customer']}}:{{seen}}"))


@app.task
async def tell(what: str) -> None:
    note("tell", what)
"""
PRODUCER = """
import json
import sys

from celery5 import chain, chord
from shop import Ordered, add_up, approval, boxed, double, limited, moody, orders, plain, threaded

producer, count = sys.argv[1], int(sys.argv[2])
names = [f"{producer}-{n}" for n in range(count)]
base = 1000 * (1 + int(producer))
jobs, runs = [], []
for number, name in enumerate(names):
    jobs += [task.delay(name) for task in (plain, threaded, moody, limited, boxed)]
    jobs.append(plain.options(countdown=0.5 + number % 3).delay("later-" + name))
    runs.append(chain(double.s(base + number), double.s()).start())
    orders.send({"customer": producer, "order": number})
    Ordered.delay(n=name)
waiting = [approval.start(name) for name in names]
runs.append(chord([double.s(base + 500 + n) for n in range(count)], add_up.s()).start())
print("sent", flush=True)
sys.stdin.readline()
for run in waiting:
    run.signal("answer", "ann")
print(json.dumps([result.get(timeout=60) for result in [*jobs, *runs, *waiting]]), flush=True)
"""


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the code of the previous version."""

    def git(*words: str) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, check=False)

    try:
        tags = (
            git("tag", "--list", "v*", "--merged", "HEAD~", "--sort", "-version:refname")
            .stdout.decode()
            .split()
        )
        archive = git("archive", tags[0] if tags else PREVIOUS)
    except FileNotFoundError:
        pytest.skip("there is no git, which has the previous version")
    if archive.returncode:
        pytest.skip(
            f"this folder has no history with the previous version: {archive.stderr.decode().strip()}"
        )
    folder = tmp_path_factory.mktemp("previous")
    subprocess.run(["tar", "x"], cwd=folder, input=archive.stdout, check=True)
    return folder


@dataclass
class Cluster:
    """Workers and producers of both versions, in one folder with the application."""

    folder: Path
    previous: Path
    stack: ExitStack
    workers: list[Serving] = field(default_factory=list)
    producers: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start_worker(self, version: str) -> Serving:
        """Start a worker of a version, and wait until it consumes."""
        worker = Serving("-A", "shop", "worker", "start", cwd=self.folder, env=self._variables(version))
        self.workers.append(self.stack.enter_context(worker).ready())
        self._check_version(worker.process.pid, version)
        return worker

    def start_beside(self, kind: str, version: str) -> None:
        """Start a Router or a Scheduler of a version, and wait until it is up."""
        process = self.stack.enter_context(
            Serving("-A", "shop", kind, "start", cwd=self.folder, env=self._variables(version))
        )
        until(lambda: process.logged(f"{kind}:started") or process.process.poll() is not None)
        self._check_version(process.process.pid, version)

    def replace_worker(self, version: str) -> None:
        """Start a worker of a version, and stop the oldest one that runs."""
        oldest = self.workers.pop(0)
        self.start_worker(version)
        oldest.process.terminate()
        assert oldest.ended().code == 0, oldest.err

    def send(self, version: str) -> None:
        """Have a producer of a version send its jobs, runs and records."""
        producer = subprocess.Popen(
            [sys.executable, "producer.py", str(len(self.producers)), str(COUNT)],
            cwd=self.folder,
            env=environment(**self._variables(version)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stack.callback(producer.kill)
        self.producers.append(self.stack.enter_context(producer))
        assert producer.stdout is not None
        assert producer.stdout.readline() == "sent\n"
        self._check_version(producer.pid, version)

    def check(self) -> None:
        """Check that each job, run, event and record was handled once, and that its producer has read the result."""
        expected: Counter[str] = Counter()
        for number, producer in enumerate(self.producers):
            output, _ = producer.communicate("\n", timeout=90)
            results, effects = expect(number)
            assert json.loads(output) == results
            expected.update(effects)
        until(lambda: len(self.effects()) >= expected.total())
        assert Counter(self.effects()) == expected

    def check_ticks(self) -> None:
        """Check that the schedule's jobs have run, each once: the id of each is made of its fire time."""
        before = len(self.effects("tick"))
        until(lambda: len(self.effects("tick")) > before + 1)
        assert max(Counter(self.effects("tick")).values()) == 1

    def effects(self, task: str = "") -> list[str]:
        """Return the records of a task; without a name, of all jobs that no schedule has sent."""
        lines = (self.folder / "effects").read_text().splitlines()
        return [line for line in lines if line.startswith(f"{task or 'tick'} ") is bool(task)]

    def _check_version(self, pid: int, version: str) -> None:
        """Check that a process has imported the version that it is to run."""
        imported = (self.folder / f"version-{pid}").read_text()
        assert imported.startswith(f"{self.previous}/") is (version == "old"), imported

    def _variables(self, version: str) -> dict[str, str]:
        # Its bytecode is written by the first of its processes, also where other tests write none.
        old = {"PYTHONPATH": str(self.previous), "PYTHONDONTWRITEBYTECODE": ""}
        return old if version == "old" else {}


def expect(producer: int) -> tuple[list[Any], list[str]]:
    """Return the results that a producer must read, and what its jobs must have done."""
    base, results, runs, effects = 1000 * (1 + producer), list[Any](), list[Any](), list[str]()
    for number in range(COUNT):
        name = f"{producer}-{number}"
        results += [name, name, [name, 2], name, name, f"later-{name}"]
        runs.append(4 * (base + number))
        effects += [f"{task} {name}" for task in ("plain", "threaded", "moody", "limited", "boxed")]
        effects += [f"plain later-{name}", f"double {base + number}", f"double {2 * (base + number)}"]
        effects += [f"tell {producer}:{number}", f"hear {name}", f"approve {name} ann"]
    header = [base + 500 + number for number in range(COUNT)]
    total = 2 * sum(header)
    waiting = ["ann"] * COUNT
    return [*results, *runs, total, *waiting], [*effects, *(f"double {n}" for n in header), f"add_up {total}"]


@pytest.fixture
def cluster(tmp_path: Path, app_name: str, url: str, previous: Path) -> Iterator[Cluster]:
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name, url=url))
    (tmp_path / "producer.py").write_text(PRODUCER)
    with ExitStack() as stack:
        yield Cluster(tmp_path, previous, stack)


@pytest.mark.skipif(
    not NIGHTLY, reason="for the night: the upgrade below has workers and producers of both versions"
)
@pytest.mark.parametrize(("worker", "producer"), [("old", "new"), ("new", "old")])
def test_workers_of_one_version_run_all_that_producers_of_the_other_send(
    cluster: Cluster, worker: str, producer: str
) -> None:
    cluster.start_worker(worker)
    cluster.start_beside("router", producer)
    cluster.start_beside("scheduler", producer)
    for _ in range(ROUNDS):
        cluster.send(producer)
    cluster.check()
    cluster.check_ticks()


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param("old", "new", id="upgrade"), pytest.param("new", "old", id="rollback")],
)
def test_a_rolling_restart_between_versions_loses_and_doubles_nothing(
    cluster: Cluster, before: str, after: str
) -> None:
    for _ in range(2):
        cluster.start_worker(before)
    for kind in ("router", "scheduler"):
        cluster.start_beside(kind, after)
    for _ in range(ROUNDS):
        cluster.send(before)
        cluster.replace_worker(after)
        cluster.send(after)
        if NIGHTLY:
            cluster.send(before)
        cluster.replace_worker(after)
        if NIGHTLY:
            cluster.send(after)
        before, after = after, before
    cluster.check()
    cluster.check_ticks()
