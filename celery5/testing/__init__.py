"""Test an application: record what it sends, run a worker in this process, run code as a job, run boot steps.

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
    from celery5.testing.recording import Recorded, SentJob

__all__ = [
    "Recorded",
    "SentJob",
    "VirtualClock",
    "arunning_steps",
    "as_job",
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
            "Recorded": "celery5.testing.recording",
            "SentJob": "celery5.testing.recording",
            "VirtualClock": "celery5.testing.clock",
            "arunning_steps": "celery5.testing.context_managers",
            "as_job": "celery5.testing.context_managers",
            "recorded": "celery5.testing.context_managers",
            "replaced": "celery5.testing.context_managers",
            "running_steps": "celery5.testing.context_managers",
            "running_worker": "celery5.testing.context_managers",
            "virtual_time": "celery5.testing.context_managers",
        },
    )
