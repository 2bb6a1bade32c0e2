"""Open the waiter for results in plain Python: a cluster has another one than a server, and most never load it."""

from celery5.broker.driver import ResultWaiter
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.drivers.opening import BlockingBroker
from celery5.broker.waiting.blocking import BlockingResultWaiter


def open_result_waiter(redis: BlockingBroker) -> ResultWaiter:
    """Return what waits for the results on the broker of a driver."""
    if isinstance(redis, BlockingRedis):
        return BlockingResultWaiter(redis, redis.endpoint)
    from celery5.broker.waiting.cluster_blocking import BlockingClusterResultWaiter

    return BlockingClusterResultWaiter(redis)
