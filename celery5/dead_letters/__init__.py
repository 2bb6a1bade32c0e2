"""Dead letters: jobs that ended badly, to be read, replayed and purged."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.dead_letters.queues import DeadLetters
    from celery5.protocol.job.dead_letters import DeadJob
    from celery5.protocol.job.failure_groups import DeadJobGroup, DeadJobGroups

__all__ = ["DeadJob", "DeadJobGroup", "DeadJobGroups", "DeadLetters"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "DeadJobGroup": "celery5.protocol.job.failure_groups",
            "DeadJobGroups": "celery5.protocol.job.failure_groups",
            "DeadJob": "celery5.protocol.job.dead_letters",
            "DeadLetters": "celery5.dead_letters.queues",
        },
    )
