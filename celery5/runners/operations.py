"""Operations: what the components of an application do with messages besides running jobs, inside of blocks.

Sending, running and settling jobs have blocks of their own. These are for the rest: records of streams, documents of
sinks, events in a Router, and what a Publisher daemon forwards.
"""

from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal

import msgspec

Headers = MutableMapping[str, str]
OperationName = Literal["send", "process", "commit", "deliver", "publish"]
OperationTarget = Literal["stream", "sink", "events", "queue"]


class MessageOperation(msgspec.Struct, eq=False):
    """Something that a component does with messages: to send, process or commit records of a stream, to deliver
    documents to a sink or events to their subscribers, or to publish what a queue's producers gave to a Publisher."""

    name: OperationName
    # What the messages belong to, and its name.
    target: OperationTarget
    resource: str
    # How many messages there are; of `commit`, how many partitions.
    count: int
    # The headers of each message, where they have any. Those of `send` are to be changed, and travel with the records.
    headers: Sequence[Headers] = ()
    # Why it failed, when the block ends. None for success.
    error: BaseException | None = None


OperationSurround = Callable[[MessageOperation], AbstractContextManager[None]]
"""Returns what surrounds an operation. It notes the error, and raises nothing of its own."""

OPERATION_SURROUND: ContextVar[OperationSurround | None] = ContextVar(
    "celery5_operation_surround", default=None
)
"""What surrounds the operations of this process; None where there is nothing."""


@contextmanager
def operating(
    name: OperationName,
    target: OperationTarget,
    resource: str,
    count: int,
    headers: Callable[[], Sequence[Headers]] = tuple,
) -> Generator[MessageOperation, None, None]:
    """Surround an operation by the middleware of this process; `headers` is called only when there is any."""
    surround = OPERATION_SURROUND.get()
    if surround is None:
        yield MessageOperation(name, target, resource, count)
        return
    operation = MessageOperation(name, target, resource, count, headers())
    with surround(operation):
        yield operation
