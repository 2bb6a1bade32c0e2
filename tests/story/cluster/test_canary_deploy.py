"""Canary: a bad version is taken back after one worker while jobs are in flight, and none of them is lost."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from celery5 import App, AsyncResult, gather
from celery5.broker.calls import dead_letters
from tests.story.cluster.controlling import LIMIT, Controlling, until

pytestmark = pytest.mark.timeout(300)
VERSION = """
from celery5 import App

app = App({name!r}, broker={url!r}, grace_period=5)


@app.task(max_retries=1000, backoff=0.01, cap=0.05)
async def price(n: int) -> int:
    {line}
    return n
"""
CLUSTER = """
hung_after = 6
canary = 60
canary_attempts = 5
[environment]
PYTHONPATH = "{folder}"
[workers.default]
"""
WORKER, CANARY = "worker-default-1", "worker-default-canary"


@contextmanager
def jobs_in_flight(app: App) -> Generator[list["AsyncResult[int]"]]:
    """Send jobs all the time; afterwards each of them must have its result."""

    @app.task(name="shop.price")
    async def price(n: int) -> int:
        return n

    sent: list[AsyncResult[int]] = []
    done = threading.Event()

    def send() -> None:
        while not done.wait(0.01):
            sent.append(price.delay(len(sent)))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield sent
    finally:
        done.set()
        sender.join()
    assert gather(sent, timeout=LIMIT) == list(range(len(sent)))


def test_a_bad_version_is_taken_back_after_one_worker_and_no_job_is_lost(
    tmp_path: Path, app_name: str, url: str
) -> None:
    for version, line in (("v1", "pass"), ("v2", "raise KeyError('currency')")):
        (tmp_path / version).mkdir()
        code = VERSION.format(name=app_name, url=url, line=line)
        (tmp_path / version / "shop.py").write_text(code)
    first, second = (CLUSTER.format(folder=tmp_path / version) for version in ("v1", "v2"))
    app = App(app_name, broker=url)
    with Controlling(tmp_path, first, env={"PYTHONPATH": str(tmp_path / "v1")}).up() as controller:
        before = controller.pids()
        with jobs_in_flight(app):
            (tmp_path / "cluster.toml").write_text(second)
            reload = controller.tell("reload", "--wait", "100")
            assert (reload.code, reload.out.count(CANARY)) == (1, 1)
            assert f"the change was taken back: {CANARY}: " in reload.error
            assert "the old version runs in: worker-default-1\n" in reload.out
            assert (
                "to go back: no member runs the new version; put the former cluster description" in reload.out
            )
            assert controller.pids() == before
            assert "1 of 1 member up; the last change was taken back" in controller.tell("status").out
            restart = controller.tell("restart", WORKER, "--wait", "100")
            assert (restart.code, restart.out.splitlines()[-1]) == (0, "done"), restart
            before = controller.pids()
            os.kill(before[WORKER], signal.SIGKILL)  # and is started again with the former version
        (failed,) = controller.logged("canary:failed")
        assert failed["why"] in reload.error
        assert len(controller.of(WORKER, "stop-requested")) == 1, "by the command that names it"
    app.close()


FULL_QUEUE = """
from celery5 import App

app = App({name!r}, broker={url!r}, grace_period=5, concurrency=2)


@app.task(name="shop.price", max_retries=0)
async def price(n: int) -> int:
    import trio

    {line}
    return n
"""
ATTEMPTS = 5


def test_canary_whose_jobs_all_fail_runs_no_more_than_its_limit_of_a_full_queue(
    tmp_path: Path, app_name: str, url: str
) -> None:
    for version, line in (("v1", "await trio.sleep(0.5)"), ("v2", "raise KeyError('currency')")):
        (tmp_path / version).mkdir()
        code = FULL_QUEUE.format(name=app_name, url=url, line=line)
        (tmp_path / version / "shop.py").write_text(code)
    first, second = (CLUSTER.format(folder=tmp_path / version) for version in ("v1", "v2"))
    app = App(app_name, broker=url)

    @app.task(name="shop.price")
    async def price(n: int) -> int:
        return n

    with Controlling(tmp_path, first, env={"PYTHONPATH": str(tmp_path / "v1")}).up() as controller:
        app.send_many([price.s(number) for number in range(500)])
        (tmp_path / "cluster.toml").write_text(second)
        reload = controller.tell("reload", "--wait", "100")
        assert "the change was taken back" in reload.error
        until(lambda: controller.of(CANARY, "ended"))
        assert app.perform(dead_letters.count_entries(app.queue("default"))) == ATTEMPTS
    app.close()


RUNNING = """
from celery5 import App

app = App({name!r}, broker={url!r}, grace_period=5)


@app.task(name="shop.get_version")
def get_version() -> str:
    return {version!r}
"""
NEXT = """
[environment]
PYTHONPATH = "v2"
[workers.default]
"""


def test_a_reload_runs_the_version_of_pythonpath_where_the_current_folder_has_the_former_one(
    tmp_path: Path, app_name: str, url: str
) -> None:
    (tmp_path / "v2").mkdir()
    for folder, version in ((tmp_path, "v1"), (tmp_path / "v2", "v2")):
        (folder / "shop.py").write_text(RUNNING.format(name=app_name, url=url, version=version))
    app = App(app_name, broker=url)

    @app.task(name="shop.get_version")
    def get_version() -> str:
        raise AssertionError("only workers run it")

    with Controlling(tmp_path, "[workers.default]").up() as controller:
        assert get_version.delay().get(timeout=LIMIT) == "v1"
        (tmp_path / "cluster.toml").write_text(NEXT)
        reload = controller.tell("reload", "--wait", "100")
        code = str(tmp_path / "v2" / "shop.py")
        assert (reload.code, reload.out.splitlines()[-2:]) == (0, [f"code: {code} (1 member)", "done"])
        assert {member["code"] for member in controller.members().values()} == {code}
        assert get_version.delay().get(timeout=LIMIT) == "v2"
        files = [line["code"] for line in controller.logged("worker:started")]
        assert files == [str(tmp_path / "shop.py"), *[code] * (len(files) - 1)]
    app.close()


MENDED = """
restart_limit = 2
canary = 5
canary_attempts = 5
[environment]
PYTHONPATH = "{folder}"
[workers.default]
[workers.main]
count = 2
queues = ["main"]
"""


def test_a_reload_waits_for_members_that_were_given_up_before_it(
    tmp_path: Path, app_name: str, url: str
) -> None:
    broken = "import os\nif 'worker-main' in open('/proc/self/cmdline').read():\n    import prices\n"
    for version, first in (("v1", ""), ("v2", broken), ("v3", "")):
        (tmp_path / version).mkdir()
        code = VERSION.format(name=app_name, url=url, line="pass")
        (tmp_path / version / "shop.py").write_text(first + code)
    v1, v2, v3 = (MENDED.format(folder=tmp_path / version) for version in ("v1", "v2", "v3"))
    description = tmp_path / "cluster.toml"
    with Controlling(tmp_path, v1, env={"PYTHONPATH": str(tmp_path / "v1")}).up() as controller:
        for later in (v1, v3):
            description.write_text(v2.replace("canary = 5", "canary = 0"))
            bad = controller.tell("reload", "--wait", "100")
            assert (bad.code, bad.error.count("prices")) == (1, 1), bad
            phases = {name: member["phase"] for name, member in controller.members().items()}
            assert [phases[f"worker-main-{number}"] for number in (1, 2, 3)] == ["up", "up", "given up"]
            description.write_text(later)
            good = controller.tell("reload", "--wait", "100")
            assert (good.code, good.out.splitlines()[-1]) == (0, "done"), good
            assert {member["phase"] for member in controller.members().values()} == {"up"}
