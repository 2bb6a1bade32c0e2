"""Count files by a map of more jobs than a queue takes at once: the sum is a plain loop's, whatever is killed."""

import shutil
from pathlib import Path

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.count_files import app
from celery5.examples.count_files.tasks import Count, count_plainly
from celery5.workflows import RunState
from tests.night import NIGHTLY
from tests.story.cluster.controlling import until
from tests.story.examples.killing import run_module, running_example

TARGET = "celery5.examples.count_files"
FILES = 12_000 if NIGHTLY else 9_000  # a map has 8,192 jobs on its queue at once
HALF_STARTER = """
import os, signal, sys
from pathlib import Path
from celery5.examples.count_files.tasks import add_up, count_file, list_files
def half(paths):
    for number, path in enumerate(paths):
        if number == 6_000:
            os.kill(os.getpid(), signal.SIGKILL)
        yield path
(count_file.map(half(list_files(Path(sys.argv[1])))) | add_up.s()).start(id="count-files")
"""


@pytest.mark.timeout(400)
def test_each_file_counts_once_although_every_process_is_killed_in_turn(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    run_module(TARGET, "make", files, "--files", str(FILES), env={})
    app.use_broker(own_server.url)

    def get_done() -> int:
        run = app.workflows.find("count-files")
        return run.status().done if run else -1

    def wait_for_share(share: float) -> None:
        until(lambda: get_done() >= share * FILES)

    with running_example(TARGET, own_server.url, tmp_path) as example:
        example.run_and_be_killed(HALF_STARTER, files)
        assert get_done() == -1, "what was published by half runs"
        assert example.run("start", files) == "run count-files has begun\n"
        for share, name in (
            (0.05, "worker-default-1"),
            (0.2, "worker-default-2"),
            (0.35, "router-default-1"),
        ):
            wait_for_share(share)
            example.kill(name)
        wait_for_share(0.5)
        example.kill_controller()
        assert example.run("start", files) == "run count-files had begun before\n"
        assert example.run("check", files).startswith(f"{FILES} files, ")
        run = app.workflows.find("count-files")
        assert run is not None
        status = run.status()
        assert (status.state, status.done, status.failed, status.active, status.pending) == (
            RunState.SUCCESS,
            FILES + 1,
            0,
            0,
            0,
        )
    app.close()
    shutil.rmtree(files)


def test_counts_add_up(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.txt").write_text("two words\nand three more")
    (tmp_path / "other.txt").write_bytes(b"\xff\n")
    assert count_plainly(tmp_path) == Count(files=2, lines=2, words=6, size=26)


def test_a_run_that_was_not_started_is_said(server: EmbeddedServer, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Error: there is no run count-files: start it"):
        run_module(TARGET, "check", tmp_path, env={"CELERY5_BROKER": server.url})
