"""How an incarnation of a process ends: in order, or by an error that nobody handles."""

import trio

from celery5.broker.transient_errors import is_key_corrupt, is_transient
from celery5.errors import LeaseLost
from celery5.protocol.job.verdict import iterate_leaves
from celery5.services.process.reloader import ConfigurationChanged


class IncarnationEnd:
    """Knows whether an error ends the process of this incarnation.

    That is a death like any other: it counts for the jobs that had begun and for the partitions that the worker owned.
    So whatever can end a worker becomes a dead letter after `max_deliveries`, also by ways that nobody has thought of.
    """

    def __init__(self) -> None:
        self._has_failed = False

    @property
    def has_failed(self) -> bool:
        """Whether an error ends the process."""
        return self._has_failed

    def note(self, error: BaseException) -> None:
        """Take note of an error that ends a step, and with it the incarnation."""
        if any(_is_fatal(leaf) for leaf in iterate_leaves(error)):
            self._has_failed = True


def _is_fatal(error: BaseException) -> bool:
    """Return whether an error is neither a stop nor one that processes survive by beginning again."""
    if isinstance(error, trio.Cancelled | ConfigurationChanged | LeaseLost):
        return False
    return not is_transient(error) and not is_key_corrupt(error)
