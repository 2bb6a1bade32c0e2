"""Declare tasks with `@task`, and read the state of the running job."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.protocol.boxes.box import Box
    from celery5.protocol.job.job import Job
    from celery5.protocol.job.retry_policy import RetryPolicy
    from celery5.runners.context import CurrentJob, current_job
    from celery5.runners.progress import progress
    from celery5.tasks.resources import INJECTED, Resource
    from celery5.tasks.sections import optional, poisonous, retry
    from celery5.tasks.task import Signature, Task

__all__ = [
    "INJECTED",
    "Box",
    "CurrentJob",
    "Job",
    "Resource",
    "RetryPolicy",
    "Signature",
    "Task",
    "current_job",
    "optional",
    "poisonous",
    "progress",
    "retry",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "INJECTED": "celery5.tasks.resources",
            "Box": "celery5.protocol.boxes.box",
            "CurrentJob": "celery5.runners.context",
            "Job": "celery5.protocol.job.job",
            "Resource": "celery5.tasks.resources",
            "RetryPolicy": "celery5.protocol.job.retry_policy",
            "Signature": "celery5.tasks.task",
            "Task": "celery5.tasks.task",
            "current_job": "celery5.runners.context",
            "optional": "celery5.tasks.sections",
            "poisonous": "celery5.tasks.sections",
            "progress": "celery5.runners.progress",
            "retry": "celery5.tasks.sections",
        },
    )
