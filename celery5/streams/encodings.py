"""Learn which encodings a stream has once declared: no other is decoded."""

from collections.abc import Iterable, Sequence
from typing import Any

from celery5.broker.calls import streams as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.streams.codec import RecordCodec


async def learn_encodings(
    redis: AsyncDriver, keys: StreamKeys, codec: RecordCodec[Any], fields: Iterable[Sequence[bytes]]
) -> None:
    """Have a codec decode what its stream has declared, if it is to decode an entry that it knows no declaration of.

    Args:
        redis: The driver of the broker.
        keys: The keys of the stream.
        codec: The codec.
        fields: The fields and values of entries, in turns.
    """
    if codec.has_undeclared(fields) and (undeclared := codec.undeclared):
        codec.declare(await redis.perform(calls.get_encodings(keys, undeclared)))
