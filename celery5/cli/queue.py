"""Queue: the commands about queues.

Floor: cli. Reads: the sizes of the application's queues, and which are paused. Writes: stdout.
"""

from typing import TYPE_CHECKING

import click

from celery5.cli.limiting import suspensions
from celery5.cli.partial import reaching
from celery5.cli.said import as_json, echo, inline, table
from celery5.cli.target import Target

if TYPE_CHECKING:
    from celery5.broker.looking import QueueState


@click.group(no_args_is_help=False)
def queue() -> None:
    """Queues hold jobs until a worker takes them."""


@queue.command("list")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_queues(target: Target, *, wants_json: bool) -> None:
    """Show each queue: waiting, running, held, scheduled and dead jobs, and whether it is paused for all.

    Of the waiting ones, `high` and `low` have such a priority."""
    app = target.load()
    with reaching(app, wants_json=wants_json):
        rows = _rows(list(app.info().queues.values()), wants_json=wants_json)
        echo(as_json(rows) if wants_json else table(rows, nothing="no queues yet: nothing was sent"))
        if not wants_json and (named := suspensions(app)):
            echo(f"\nsuspended  {inline(named)}")


def _rows(states: "list[QueueState]", *, wants_json: bool) -> list[dict[str, object]]:
    by_level = wants_json or any(each.high or each.low for each in states)
    return [
        {
            "queue": each.queue,
            "waiting": each.waiting,
            **({"high": each.high, "low": each.low} if by_level else {}),
            "running": each.running,
            "held": each.held,
            "scheduled": each.scheduled,
            "dead": each.dead,
            "paused": each.paused if wants_json else "yes" if each.paused else "",
            **({"documents": each.documents} if wants_json and each.documents else {}),
        }
        for each in states
    ]
