"""Report brokers that are unreachable while the others have answered.

The result lacks what those brokers have. A line on stderr, a field for programs and the exit code report that.
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
    """An unreachable broker and the error of the connection."""

    broker: str
    error: str


class ReachedBrokers(NamedTuple):
    """The brokers that a command did not reach; `errors` grows while the command runs."""

    errors: Mapping[str, BrokerError]
    relevant: Collection[str]

    @property
    def relevant_errors(self) -> dict[str, BrokerError]:
        """Return the errors of relevant brokers."""
        return {name: error for name, error in self.errors.items() if name in self.relevant}

    def unreachable(self) -> list[UnreachableBroker]:
        """Return the field `unreachable` for programs."""
        return [
            UnreachableBroker(name, get_error_text(error)) for name, error in self.relevant_errors.items()
        ]


@contextmanager
def skip_unreachable(
    app: "App", *, wants_json: bool = False, queues: Collection[str] = ()
) -> Generator[ReachedBrokers, None, None]:
    """Leave out unreachable brokers inside the block, and report them at its end.

    The report goes to stderr, as JSON with `wants_json`, and the command exits with EXIT_FAILED. With `queues` only
    the brokers of these queues are relevant.
    """
    relevant = {app.brokers.broker_of_queue(queue) for queue in queues} if queues else app.brokers.names
    with app.brokers.reachable() as errors:
        reached = ReachedBrokers(errors, relevant)
        try:
            yield reached
        except Exception as error:
            if all(
                error is not broker_error for broker_error in errors.values()
            ):  # else the message of the error reports it
                _warn(reached, wants_json=wants_json)
            raise
        if reached.relevant_errors:
            _warn(reached, wants_json=wants_json)
            click.get_current_context().exit(EXIT_FAILED)


def _warn(reached: ReachedBrokers, *, wants_json: bool) -> None:
    brokers = reached.unreachable()
    if not brokers:
        return
    if wants_json:
        echo(to_json({"unreachable": brokers}), err=True)
        return
    descriptions = "; ".join(
        f"broker {format_cell(broker.broker)} cannot be reached ({format_cell(broker.error)})"
        for broker in brokers
    )
    echo(f"Warning: what is there is left out: {descriptions}", err=True)
