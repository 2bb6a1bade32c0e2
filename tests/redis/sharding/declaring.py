"""Declare tasks of a sharded queue, whose types do not matter here."""

from collections.abc import Callable
from typing import Any, cast

import celery5
from celery5 import App
from celery5.protocol.shards import list_shards

QUEUE = "mails"
SHARDS = list_shards(QUEUE, 4)


def declare(app: App, function: Callable[..., Any], **options: Any) -> Any:
    """Return the task of a function, of its name and by default on the sharded queue."""
    return cast("Any", app).task(**{"queue": QUEUE, "name": function.__name__} | options)(function)


def chain(*steps: Any) -> Any:
    """Return the workflow of some steps."""
    return cast("Any", celery5).chain(*steps)
