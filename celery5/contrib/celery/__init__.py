"""Celery and celery5 side by side: Celery's producers feed our queues, our producers feed Celery's workers."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.contrib.celery.bridge import CeleryBridge
    from celery5.contrib.celery.outgoing import celery_task
    from celery5.contrib.celery.result_backend import CeleryResults

__all__ = ["CeleryBridge", "CeleryResults", "celery_task"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "CeleryBridge": "celery5.contrib.celery.bridge",
            "CeleryResults": "celery5.contrib.celery.result_backend",
            "celery_task": "celery5.contrib.celery.outgoing",
        },
    )
