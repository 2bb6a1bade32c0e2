"""Own steps: the example with a boot step and a service of its own works in every way that a worker is started."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from celery5 import AsyncResult, JobState
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.own_steps import app
from celery5.examples.own_steps.rates import change
from tests.story.cli.commands import Serving, celery5, until

EXAMPLE = "celery5.examples.own_steps"
Write = Callable[[str], None]


@pytest.fixture
def bureau(own_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server of the test's own, which the example's application uses meanwhile."""
    before = app.settings.broker
    app.use_broker(own_server.url)
    app.load()
    yield own_server
    app.use_broker(before)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an application into `own.py`."""

    def one(code: str) -> None:
        (tmp_path / "own.py").write_text(f"from celery5 import App, BootStep, service\n{dedent(code)}")

    return one


def said(worker: Serving, logger: str) -> list[str]:
    """What a step has logged."""
    return [line["message"] for line in worker.logged("log") if line["logger"] == f"bureau.{logger}"]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_example_prepares_watches_and_tidies_up(
    bureau: EmbeddedServer, tmp_path: Path, processes: int
) -> None:
    words = ["-A", EXAMPLE, "worker", "start", "--processes", processes]
    with Serving(*words, cwd=tmp_path, env={"CELERY5_BROKER": bureau.url}) as worker:
        worker.ready(processes)
        assert change.delay(10.0, "USD").get(timeout=30) == 9.0
        told = until(lambda: len(set(said(worker, "rate-watch"))) >= processes and said(worker, "rate-watch"))
        result: AsyncResult[Any] = app.result(told[0].split()[-1])
        assert until(lambda: result.status() is JobState.SUCCESS)
        until(lambda: said(worker, "greeting") == ["we change EUR, USD"] * processes)
        worker.signal(signal.SIGTERM)
        assert worker.ended().code == 0
        assert said(worker, "rates") == ["the bureau is closed"] * processes


def test_the_example_works_in_development(tmp_path: Path, server_binary: str | None) -> None:
    with Serving("-A", EXAMPLE, "controller", "start", "--development", cwd=tmp_path) as worker:
        worker.ready()
        until(lambda: [line for line in worker.logged("job") if line["state"] == "SUCCESS"])
        worker.signal(signal.SIGTERM)
        assert worker.ended().code == 0
        assert said(worker, "rates") == ["the bureau is closed"]


def test_a_mandatory_step_that_fails_ends_the_worker_with_one_line(
    bureau: EmbeddedServer, tmp_path: Path
) -> None:
    env = {"CELERY5_BROKER": bureau.url, "RATES": str(tmp_path / "none.json")}
    ended = celery5("-A", EXAMPLE, "worker", "start", "--log-level", "error", cwd=tmp_path, env=env)
    assert ended.code == 1
    assert ended.err.startswith("Error: boot step 'rates' did not come up: FileNotFoundError: ")
    assert len(ended.err.splitlines()) == 1
    assert "worker:started" not in ended.out
    assert "in read_rates" in ended.out  # the traceback is in the log


def test_processes_that_cannot_start_are_given_up(bureau: EmbeddedServer, tmp_path: Path) -> None:
    env = {"CELERY5_BROKER": bureau.url, "RATES": str(tmp_path / "none.json")}
    ended = celery5("-A", EXAMPLE, "worker", "start", "--processes", 2, cwd=tmp_path, env=env)
    assert ended.code == 1
    assert "boot step 'rates' did not come up" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            'app = App("own", bootsteps=[BootStep("a", print, requires=["publshing"])])',
            "boot step 'a' requires 'publshing', which is not there; did you mean 'publishing'?",
        ),
        (
            'app = App("own", bootsteps=[BootStep("heartbeat", print)])',
            "boot step 'heartbeat' has the name of one of celery5's own: give it another; taken: ",
        ),
        (
            'app = App("own", bootsteps=[BootStep("a", print, "b"), BootStep("b", print, "a")])',
            "boot steps require each other in a circle: ",
        ),
        (
            'async def ask(pool): ...\napp = App("own", services=[ask])',
            "boot step 'ask' asks for 'pool', which is not there; there are: app, inbox, logger, settings, worker",
        ),
    ],
    ids=["unknown", "ours", "circle", "asks"],
)
def test_steps_that_do_not_fit_are_told_of_in_one_line_and_nothing_starts(
    own_server: EmbeddedServer, tmp_path: Path, write: Write, code: str, error: str, processes: int
) -> None:
    write(code)
    words = ["-A", "own", "worker", "start", "--processes", processes]
    ended = celery5(*words, cwd=tmp_path, env={"CELERY5_BROKER": own_server.url})
    assert ended.error.startswith(f"Error: {error}")
    assert ended.code == 2
    assert ended.out == ""


def test_a_step_without_a_name_of_its_own_is_told_of_when_it_is_declared(
    tmp_path: Path, write: Write
) -> None:
    write('app = App("own", bootsteps=[BootStep("a", print)], services=[service(print, name="a")])')
    ended = celery5("-A", "own", "worker", "start", cwd=tmp_path)
    assert "two boot steps or services are named 'a'" in ended.error
    assert ended.code == 2


def test_a_service_may_be_named_by_its_place_and_import_the_application(
    own_server: EmbeddedServer, tmp_path: Path, write: Write
) -> None:
    write('app = App("own", services=["beats:beat"])')
    (tmp_path / "beats.py").write_text(
        dedent(
            """
            from own import app

            @app.task
            async def noted() -> None: ...

            async def beat(logger) -> None:
                await (await noted.adelay()).aget()
                logger.info("noted")
            """
        )
    )
    env = {"CELERY5_BROKER": own_server.url}
    with Serving("-A", "own", "worker", "start", cwd=tmp_path, env=env) as worker:
        worker.ready()
        until(lambda: [line for line in worker.logged("log") if line["message"] == "noted"])
        until(lambda: worker.logged("step:ended"))
