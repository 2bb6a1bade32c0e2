"""The operations, by the noun of the command line that does the same."""

from collections.abc import Mapping

from celery5.dashboard.operation import Operation
from celery5.dashboard.operations.cluster import CLUSTER_OPERATIONS
from celery5.dashboard.operations.queues import QUEUE_OPERATIONS

OPERATIONS: Mapping[str, Operation] = {
    operation.name: operation for operation in (*CLUSTER_OPERATIONS, *QUEUE_OPERATIONS)
}
"""Every operation by name."""
