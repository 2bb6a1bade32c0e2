"""Erase the streams of an application that was made for a moment, such as a demonstration or a test."""

from celery5.application import Application
from celery5.broker.calls import streams as calls
from celery5.broker.driver import AsyncDriver


async def erase_streams(app: Application, redis: AsyncDriver) -> None:
    """Delete everything that the streams of an application have. Its workers must have stopped.

    Raises:
        BrokerUnavailable: Redis cannot be reached.
    """
    for stream in await redis.perform(calls.list_streams(app.keys)):
        keys = app.keys.for_stream(stream)
        groups = await redis.perform(calls.list_groups(keys))
        for group in groups:
            parked = await redis.perform(calls.list_parked_keys(keys, group))
            await redis.perform(calls.erase_parked(keys, group, list(parked.keys)))
        partitions = await redis.perform(calls.count_partitions(keys))
        await redis.perform(calls.erase_stream(keys, groups, partitions))
