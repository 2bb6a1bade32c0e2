"""Task: the commands about single jobs.

Floor: cli. Reads: where a job is, and its document. Writes: stdout.
"""

import click

from celery5.cli.said import as_json, from_json, lines
from celery5.cli.target import Target
from celery5.errors import CeleryError


class UnknownJob(CeleryError):
    """Nothing is known of the id: it was never sent, or its result has expired."""


@click.group(no_args_is_help=False)
def task() -> None:
    """Jobs that were sent."""


@task.command()
@click.argument("job_id", metavar="ID")
@click.option("--queue", help="The queue it was sent to; default: the application's default queue.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, job_id: str, queue: str | None, *, wants_json: bool) -> None:
    """Show where the job ID is, and how it ended. Exits with 1 when nothing is known of it."""
    app = target.load()
    from celery5.broker import calls
    from celery5.result import state_of

    name = queue or app.settings.default_queue
    place = app.perform(calls.locate(app.queue(name), job_id), instead="aperform")
    shown: dict[str, object] = {"id": job_id, "queue": name, "state": state_of(place).value}
    if shown["state"] == "UNKNOWN":
        raise UnknownJob(
            f"nothing is known of job {job_id!r} on queue {name!r}: name its queue with --queue, or it has expired"
        )
    if place.worker:
        shown["worker"] = place.worker
    if place.document:
        shown |= from_json(place.document)
    click.echo(as_json(shown) if wants_json else lines(shown))
