"""Report brokers that are unreachable while the others have answered.

What they have is left out, and that is told: by a line on stderr, by a field for programs, and by the exit code.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.output import echo, format_cell, to_json
from celery5.errors import BrokerError
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from celery5.app import App


class UnreachableBroker(msgspec.Struct, frozen=True):
    """A broker that is away, and why nobody got through to it."""

    broker: str
    error: str


class ReachedBrokers(NamedTuple):
    """Which brokers a command did not reach; it grows while it asks."""

    errors: Mapping[str, BrokerError]
    relevant: Collection[str]

    @property
    def relevant_errors(self) -> dict[str, BrokerError]:
        """Those that matter."""
        return {name: error for name, error in self.errors.items() if name in self.relevant}

    def unreachable(self) -> list[UnreachableBroker]:
        """For programs: the field `unreachable`."""
        return [
            UnreachableBroker(name, get_error_text(error)) for name, error in self.relevant_errors.items()
        ]


@contextmanager
def skip_unreachable(
    app: "App", *, wants_json: bool = False, queues: Collection[str] = ()
) -> Generator[ReachedBrokers, None, None]:
    """Within this block all brokers are asked and those that are away are left out. At its end they are told of on
    stderr, as JSON when that is wanted, and the command ends with `FAILED`. Those that have none of the `queues` do not
    matter, if any are named."""
    about = {app.brokers.broker_of_queue(queue) for queue in queues} if queues else app.brokers.names
    with app.brokers.reachable() as away:
        reached = ReachedBrokers(away, about)
        try:
            yield reached
        except Exception as error:
            if all(error is not each for each in away.values()):  # else it tells of this itself
                _warn(reached, wants_json=wants_json)
            raise
        if reached.relevant_errors:
            _warn(reached, wants_json=wants_json)
            click.get_current_context().exit(EXIT_FAILED)


def _warn(reached: ReachedBrokers, *, wants_json: bool) -> None:
    found = reached.unreachable()
    if not found:
        return
    if wants_json:
        echo(to_json({"unreachable": found}), err=True)
        return
    named = "; ".join(
        f"broker {format_cell(each.broker)} cannot be reached ({format_cell(each.error)})" for each in found
    )
    echo(f"Warning: what is there is left out: {named}", err=True)
