"""Task show: what people read of a job that runs, one that went well, and one that failed again and again."""

import json
import re
import sys

from celery5 import JobState
from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"


def fields(shown: str) -> dict[str, str]:
    """What is shown by name, up to the first empty line."""
    head, _, _ = shown.partition("\n\n")
    return dict(line.split(maxsplit=1) for line in head.splitlines())


def test_who_did_a_job_and_when_and_what_came_of_it(desk: Desk) -> None:
    shop = sys.modules["shop"]
    # Its history, which comes within seconds, would have the attempts as well.
    env = {"CELERY5_JOB_HISTORY": "0"}
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder, env=env).ready() as worker:
        name = worker.logged("worker:started")[0]["worker"]
        fine, running = shop.add.delay(1, 2), shop.stuck.delay()
        hopeless = shop.hopeless.options(max_retries=2, backoff=0.01).delay()
        fine.get(timeout=30)
        until(lambda: hopeless.status() is JobState.DEAD and running.status() is JobState.EXECUTING)
        shown = {job: desk("task", "show", job.id) for job in (fine, hopeless, running)}
        assert running.revoke()
        until(lambda: running.status() is JobState.REVOKED)

    went_well = fields(shown[fine])
    assert went_well["worker"] == name
    for moment in ("sent", "started", "finished"):
        assert re.fullmatch(rf"{MOMENT} \((just now|.* ago)\)", went_well[moment]), moment
    assert re.fullmatch(r"[\d.]+ (ms|s)", went_well["took"])
    assert (went_well["state"], went_well["value"], went_well["attempt"]) == ("SUCCESS", "3", "1")
    assert "attempts that failed" not in shown[fine]

    failed = fields(shown[hopeless])
    assert (failed["state"], failed["attempt"], failed["worker"]) == ("DEAD", "3 of 3", name)
    assert (failed["reason"], failed["error"]) == ("exhausted", "ValueError: never")
    assert re.fullmatch(r"\d+-\d+", failed["entry"])
    assert {"started", "finished", "took"} <= failed.keys()
    assert "value" not in failed
    _, _, earlier = shown[hopeless].partition("\nattempts that failed\n")
    told = [rf"  {n}  ValueError: never \({MOMENT} {name}\)" for n in (1, 2)]
    assert re.fullmatch("\n".join(told) + "\n", earlier)

    runs = fields(shown[running])
    assert (runs["state"], runs["task"], runs["worker"], runs["attempt"]) == (
        *("EXECUTING", "shop.stuck", name, "1 of 4"),
    )
    assert re.fullmatch(rf"{MOMENT} \((just now|.* ago)\)", runs["taken"])
    assert not {"finished", "took", "value", "error", "reason"} & runs.keys()


def test_how_far_a_job_is_and_where_its_code_stands_is_shown_while_it_runs(desk: Desk) -> None:
    shop = sys.modules["shop"]
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder).ready():
        running = shop.resize.delay()
        until(lambda: running.progress() is not None)
        shown = fields(desk("task", "show", running.id))
        assert re.fullmatch(r"30 of 120 \(25 %\): resizing \((just now|.* ago)\)", shown["progress"])
        told = json.loads(desk("task", "show", running.id, "--json"))["progress"]
        assert (told["done"], told["total"], told["note"], told["attempt"]) == (30, 120, "resizing", 1)
        assert told["worker"].startswith("w1:")
        assert "30 of 120 (25 %): resizing" in desk("worker", "active")
        (job,) = json.loads(desk("worker", "active", "--json"))[0]["answer"]
        assert job["progress"] == {"done": 30, "total": 120, "note": "resizing"}
        head, *lines = desk("worker", "stack", "--job", running.id).splitlines()
        assert head == f"w1  {running.id}  shop.resize  trio"
        assert any(line.startswith('  File "') and line.endswith(", in resize") for line in lines)
        (reply,) = json.loads(desk("worker", "stack", "--to", "w1", "--json"))
        assert [stack["kind"] for stack in reply["answer"]["stacks"]] == ["trio", "worker"]
        assert running.revoke()
        until(lambda: running.status() is JobState.REVOKED)


def test_task_show_names_the_code_that_a_job_waits_for(desk: Desk) -> None:
    with Serving(
        "-A", "shop", "worker", "start", cwd=desk.folder, env={"CELERY5_UNKNOWN_TASK_GRACE": "300"}
    ).ready():
        (desk.folder / "newer.py").write_text(
            (desk.folder / "shop.py").read_text()
            + "@app.task(name='shop.rotate')\nasync def rotate(n: int) -> int: ...\n"
        )
        job_id = celery5(
            "-A", "newer", "task", "send", "shop.rotate", "--args", "[1]", cwd=desk.folder
        ).out.strip()
        until(lambda: (job := desk.app.find(job_id)) is not None and job.state is JobState.HELD)
        shown = fields(desk("task", "show", job_id))
        told = json.loads(desk("task", "show", job_id, "--json"))
    until_when = rf"{MOMENT} \(in [45] min.*\)"
    assert re.fullmatch(until_when, shown["due"]), shown
    assert re.fullmatch(
        "for +a worker whose code has task shop.rotate: none is live; "
        rf"if none comes by {until_when}, it is dead: unknown-task",
        shown["waits"],
    )
    assert told["waits_for_code"]["since"] > 0
