"""A job on a paused queue: each surface that shows the job says why it waits."""

import time

from celery5 import App
from celery5.cli.commands.job_details import format_job_details
from celery5.dashboard.pages.jobs import tell_story
from celery5.operations.table import OPERATIONS


async def show(app: App, job_id: str) -> tuple[str, str]:
    """What the page of a job and `task show` say of it."""
    operation = OPERATIONS["task:show"]
    details = await operation.perform(app, operation.parse({"id": job_id}, is_text=False))
    lines = [line.text for line in tell_story(details, time.time())]
    return lines[-1], "\n".join(format_job_details(details, time.time()))


async def test_a_job_on_a_paused_queue_says_so(app: App) -> None:
    @app.task(queue="till")
    async def pay() -> None: ...

    job = await pay.adelay()
    pause, resume = OPERATIONS["queue:pause"], OPERATIONS["queue:resume"]
    await pause.perform(app, pause.parse({"queue": "till"}, is_text=False))
    page, printed = await show(app, job.id)
    assert page == "waits on queue till, which is paused"
    assert "queue till, which is paused" in printed
    await resume.perform(app, resume.parse({"queue": "till"}, is_text=False))
    page, printed = await show(app, job.id)
    assert page == "waits on queue till for a worker"
    assert "which is paused" not in printed
