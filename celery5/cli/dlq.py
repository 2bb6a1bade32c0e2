"""Dlq: the commands about dead-letter queues.

Floor: cli. Reads: the dead-letter queues. Writes: stdout.
"""

import click

from celery5.cli.said import as_json, table
from celery5.cli.serving import queue_names
from celery5.cli.target import Target
from celery5.errors import Corrupt


@click.group(no_args_is_help=False)
def dlq() -> None:
    """Dead-letter queues keep the jobs that failed for good."""


@dlq.command()
@click.option("--queue", "queues", default="", metavar="A,B", help="Queues to look at; default: all.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Jobs of each queue, oldest first.",
)
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def read(target: Target, queues: str, limit: int, *, wants_json: bool) -> None:
    """Show dead jobs and why they are dead."""
    app = target.load()
    from celery5.broker import calls

    names = queue_names(queues) or tuple(app.perform(calls.queues(app.keys), instead="aperform"))
    rows: list[dict[str, object]] = []
    for name in names:
        for entry, _job, document in app.perform(
            calls.dead(app.queue(name), count=limit), instead="aperform"
        ):
            rows.append({"queue": name, "entry": entry, **_told(document)})
    click.echo(as_json(rows) if wants_json else table(rows, nothing="no dead jobs"))


def _told(raw: bytes) -> dict[str, object]:
    from celery5.protocol.envelope import read_document

    try:
        document = read_document(raw)
    except Corrupt as error:
        return {"job": "", "task": "", "attempt": 0, "reason": "corrupt", "error": str(error)}
    failure = document.failure
    return {
        "job": document.id,
        "task": document.task,
        "attempt": document.attempt,
        "reason": document.reason,
        "error": f"{failure.type}: {failure.message}" if failure else "",
    }
