"""Send a job when the current transaction of Django has been committed (`delay_on_commit`).

These are methods of every task, and not of a class of Django's own tasks as in Celery: the arguments are checked by the
types of the task, and a task of a library that knows nothing of Django has them, too. Without Django they raise.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from celery5.broker.colour import get_awaitable_colour
from celery5.errors import Misconfigured


async def call_on_commit(function: Callable[[], object], *, using: str | None, robust: bool) -> None:
    """Have Django call `function` after the commit of the current transaction, and at once without one.

    On asyncio this happens in the thread that has the connection of the caller's asynchronous queries.

    Args:
        function: Called in plain Python; never after a rollback.
        using: The alias of the database; None for the default one.
        robust: Log an error of the function instead of raising it after the commit.

    Raises:
        Misconfigured: Django is not installed, or the caller runs on Trio, where Django has no connection.
        BlockingInEventLoop: A blocking twin was called in an event loop.
    """
    if find_spec("django") is None:
        raise Misconfigured(
            "delay_on_commit is for Django's transactions, and Django is not installed: with another database, make "
            "the signature inside of the transaction, and send it after it"
        )
    from django.db import transaction

    colour = get_awaitable_colour()
    if colour == "trio":
        raise Misconfigured(
            "adelay_on_commit: Django has no connections on Trio: declare the task with `def`, for delay_on_commit, or "
            "with loop='asyncio'"
        )
    if colour is None:
        transaction.on_commit(function, using=using, robust=robust)
        return
    from asgiref.sync import sync_to_async

    register: Any = sync_to_async(transaction.on_commit)
    await register(function, using=using, robust=robust)
