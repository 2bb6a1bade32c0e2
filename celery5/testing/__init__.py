"""Test an application: run its jobs in the test without a server, or record them, run a worker, or boot steps.

`celery5.testing.pytest` offers the same as fixtures. Nothing else here imports pytest.
"""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.testing.clock import VirtualClock
    from celery5.testing.context_managers import (
        arunning_steps,
        as_job,
        recorded,
        replaced,
        running_steps,
        running_worker,
        virtual_time,
    )
    from celery5.testing.in_memory_worker import InMemoryWorker, RanJob, in_memory
    from celery5.testing.recording import Recorded
    from celery5.testing.sent_messages import SentJob

__all__ = [
    "InMemoryWorker",
    "RanJob",
    "Recorded",
    "SentJob",
    "VirtualClock",
    "arunning_steps",
    "as_job",
    "in_memory",
    "recorded",
    "replaced",
    "running_steps",
    "running_worker",
    "virtual_time",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "InMemoryWorker": "celery5.testing.in_memory_worker",
            "RanJob": "celery5.testing.in_memory_worker",
            "Recorded": "celery5.testing.recording",
            "SentJob": "celery5.testing.sent_messages",
            "VirtualClock": "celery5.testing.clock",
            "arunning_steps": "celery5.testing.context_managers",
            "as_job": "celery5.testing.context_managers",
            "in_memory": "celery5.testing.in_memory_worker",
            "recorded": "celery5.testing.context_managers",
            "replaced": "celery5.testing.context_managers",
            "running_steps": "celery5.testing.context_managers",
            "running_worker": "celery5.testing.context_managers",
            "virtual_time": "celery5.testing.context_managers",
        },
    )
