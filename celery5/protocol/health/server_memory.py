"""The one definition of how full a server's memory is, and whether it takes writes: what all surfaces show."""

from collections.abc import Mapping, Sequence

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.byte_counts import format_bytes

OUT_OF_MEMORY = "OOM"
"""The code of the error by which a server that is full refuses a write."""
ALMOST_FULL = 0.9
"""The share of its memory from which on a server is almost full."""
MORE_MEMORY = (
    "raise maxmemory (CONFIG SET maxmemory, and in redis.conf) if the host has more, "
    "or free memory: `celery5 queue storage` shows what fills it"
)
"""What to do about a full server."""


class ServerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the server of one broker."""

    broker: str
    # Bytes that count against the limit, and the limit; None for none.
    used: int
    limit: int | None = None
    # The maxmemory-policy; '' where the server does not say.
    policy: str = ""
    # What takes the most of it, in words; '' when that was not asked for.
    filled_by: str = ""

    @property
    def share(self) -> float:
        """The share of the limit that is used; 0 without a limit."""
        return self.used / self.limit if self.limit else 0.0

    @property
    def is_almost_full(self) -> bool:
        """Whether little is left, or nothing."""
        return self.share > ALMOST_FULL

    @property
    def is_full(self) -> bool:
        """Whether the server takes no writes, since its memory is full.

        With a policy that evicts any key it takes them, and throws jobs away instead. One that evicts only keys with a
        time to live is full when none of those is left: jobs have none.
        """
        return self.share >= 1 and not self.policy.startswith("allkeys-")

    def describe(self) -> str:
        """Return how full it is in words, with what fills it; '' while it is not almost full."""
        if not self.is_almost_full or self.limit is None:
            return ""
        state = "full, nothing more is stored" if self.is_full else "almost full"
        filled = f"; most of it: {self.filled_by}" if self.filled_by else ""
        usage = (
            f"{self.share:.0%} of maxmemory used ({format_bytes(self.used)} of {format_bytes(self.limit)})"
        )
        return f"{state}: {self.policy or 'unknown policy'}, {usage}{filled}"


def read_server_memory(
    broker: str, info: Mapping[str, str], policy: str | None = None
) -> ServerMemory | None:
    """Return the memory of a server from its `INFO`; None where that does not say.

    Args:
        broker: The name of the broker.
        info: The section `memory` of `INFO`, or all of it.
        policy: The maxmemory-policy, if it is known from elsewhere.
    """
    used = _count(info.get("used_memory"))
    if not used:
        return None
    return ServerMemory(
        broker=broker,
        # Buffers of replicas and of the append-only file: the server does not count them either.
        used=max(0, used - _count(info.get("mem_not_counted_for_evict"))),
        limit=_count(info.get("maxmemory")) or None,
        policy=policy or info.get("maxmemory_policy", ""),
    )


def find_fullest(infos: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the `INFO` of the server that uses the largest share of its memory."""

    def get_share(info: Mapping[str, str]) -> float:
        memory = read_server_memory("", info)
        return memory.share if memory is not None else 0.0

    fullest = max(infos, key=get_share)
    return dict(fullest)


def _count(text: str | None) -> int:
    return read_whole(text or "")
