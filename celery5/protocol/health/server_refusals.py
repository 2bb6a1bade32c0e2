"""The one definition of how a process logs that a server refuses calls which it takes at other times.

A missing permission is not among them: it concerns some keys or commands, and the line of the service that lacks it
says what does not work.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from celery5.errors import BrokerLoading, BrokerReadOnly, BrokerReplied
from celery5.protocol.health.server_memory import OUT_OF_MEMORY

READ_ONLY = "READONLY"
LOADING = "LOADING"


class ServerRefusal(msgspec.Struct, frozen=True):
    """One kind of refusal: what to do, and the level of the line that says so."""

    hint: str
    level: Literal["warning", "error"] = "error"


_BY_ITSELF = "this process goes on by itself then"
REFUSALS: Mapping[str, ServerRefusal] = {
    OUT_OF_MEMORY: ServerRefusal("queues drain, and what adds work is refused: see celery5 docs failures"),
    "MISCONF": ServerRefusal(f"Redis cannot write to its disk: free space, and see its log; {_BY_ITSELF}"),
    "NOREPLICAS": ServerRefusal(
        f"start the replicas of Redis, or lower its min-replicas-to-write: {_BY_ITSELF}"
    ),
    READ_ONLY: ServerRefusal(
        f"wait for the end of a failover, or name the primary in the broker URL: {_BY_ITSELF}",
        level="warning",
    ),
    LOADING: ServerRefusal(f"wait until Redis has loaded its data: {_BY_ITSELF}", level="warning"),
}
"""The kinds of refusals by the code of the error."""


def get_refusal_code(error: BaseException) -> str:
    """Return the code in REFUSALS of an error with which a server has refused a call; '' for other errors."""
    match error:
        case BrokerReadOnly():
            return READ_ONLY
        case BrokerLoading():
            return LOADING
        case BrokerReplied(code=code) if code in REFUSALS:
            return code
        case _:
            return ""
