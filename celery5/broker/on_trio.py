"""On Trio: the driver for Trio programs, in one import.

Floor: broker. Reads: nothing. Writes: nothing.

Three classes for three uses. `TrioRedis` carries the ordinary calls of all tasks at once. `ParkedRedis` makes
the blocking reads, which would hold up everybody else. `PushRedis` receives what is published on channels.
Open `TrioRedis` first and close it last: links live in an outer nursery, the work that uses them in an inner
one.
"""

from celery5.broker.link_events import (
    BreakerClosed,
    BreakerOpened,
    LinkConnected,
    LinkConnectFailed,
    LinkEvent,
    LinkLost,
    LinkStatistics,
)
from celery5.broker.park import ParkedRedis
from celery5.broker.push import PushRedis
from celery5.broker.timing import Timing
from celery5.broker.trio_redis import TrioRedis

__all__ = [
    "BreakerClosed",
    "BreakerOpened",
    "LinkConnectFailed",
    "LinkConnected",
    "LinkEvent",
    "LinkStatistics",
    "LinkLost",
    "ParkedRedis",
    "PushRedis",
    "Timing",
    "TrioRedis",
]
