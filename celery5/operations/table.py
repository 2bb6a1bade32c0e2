"""The operations, by the noun of the command line that does the same."""

from collections.abc import Mapping

from celery5.operations.alerts import ALERT_OPERATIONS
from celery5.operations.bulk import BULK_OPERATIONS
from celery5.operations.cluster import CLUSTER_OPERATIONS
from celery5.operations.dead_letters import DEAD_LETTER_OPERATIONS
from celery5.operations.events import EVENT_OPERATIONS
from celery5.operations.jobs import JOB_OPERATIONS
from celery5.operations.limits import LIMIT_OPERATIONS
from celery5.operations.operation import Operation
from celery5.operations.processes import PROCESS_OPERATIONS
from celery5.operations.queues import QUEUE_OPERATIONS
from celery5.operations.schedules import SCHEDULE_OPERATIONS
from celery5.operations.streams import STREAM_OPERATIONS
from celery5.operations.workflows import WORKFLOW_OPERATIONS

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation
    for operation in (
        *CLUSTER_OPERATIONS,
        *ALERT_OPERATIONS,
        *QUEUE_OPERATIONS,
        *JOB_OPERATIONS,
        *LIMIT_OPERATIONS,
        *DEAD_LETTER_OPERATIONS,
        *BULK_OPERATIONS,
        *PROCESS_OPERATIONS,
        *SCHEDULE_OPERATIONS,
        *EVENT_OPERATIONS,
        *STREAM_OPERATIONS,
        *WORKFLOW_OPERATIONS,
    )
}
"""Every operation by name."""
