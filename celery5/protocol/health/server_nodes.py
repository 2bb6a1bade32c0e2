"""The servers of one broker: which are primaries, which replicas follow them, and how far behind these are."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.hash_slots import NodeAddress, read_node_address


class ReplicaView(msgspec.Struct, frozen=True):
    """A replica, as its primary sees it."""

    address: str
    # `online`, or an earlier state; '' if it is not connected.
    state: str = ""
    # Seconds since its last confirmation, and the bytes that it has not confirmed; None if unknown.
    lag: float | None = None
    behind: int | None = None

    @property
    def is_online(self) -> bool:
        """Whether it is connected, and lacks the last writes at most."""
        return self.state == "online"

    def describe_lag(self) -> str:
        """Return how far behind it is, or why that is not known."""
        if not self.is_online:
            return self.state or "not connected"
        return f"{self.lag or 0:g} s, {format_bytes(self.behind or 0)}"

    def describe(self) -> str:
        """Return its address and how far behind it is."""
        return f"{self.address} ({'lag ' if self.is_online else ''}{self.describe_lag()})"


class PrimaryView(msgspec.Struct, frozen=True, kw_only=True):
    """A primary and its replicas."""

    broker: str = ""
    # '' if unknown.
    address: str
    # The ranges of its hash slots, as `0-5460`; none outside of a cluster.
    slots: tuple[str, ...] = ()
    replicas: tuple[ReplicaView, ...] = ()
    # Why it could not be asked.
    error: str = ""

    @property
    def online_replicas(self) -> list[str]:
        """The addresses of the replicas that could take its place."""
        return [replica.address for replica in self.replicas if replica.is_online]


def read_replicas(info: Mapping[str, str]) -> tuple[ReplicaView, ...]:
    """Return the replicas that are connected to a primary, from its `INFO`, in its order."""
    sent = _count(info.get("master_repl_offset"))
    found: list[ReplicaView] = []
    for name, value in info.items():
        if not (name.startswith("slave") and name[len("slave") :].isdigit()):
            continue
        fields = {key: text for key, _, text in (part.partition("=") for part in value.split(","))}
        has, lag = _count(fields.get("offset")), _count(fields.get("lag"))
        found.append(
            ReplicaView(
                str(NodeAddress(fields.get("ip", ""), _count(fields.get("port")) or 0)),
                fields.get("state", ""),
                lag,
                None if sent is None or has is None else max(0, sent - has),
            )
        )
    return tuple(found)


def read_primaries(raw: Any, asked: NodeAddress) -> list[PrimaryView]:
    """Return the primaries of a cluster with their slots, and their replicas as not connected.

    Args:
        raw: The reply to CLUSTER SLOTS.
        asked: The node that has sent it.
    """
    slots: dict[str, list[str]] = {}
    replicas: dict[str, dict[str, None]] = {}
    for first, last, *nodes in raw:
        primary = str(read_node_address(nodes[0], asked))
        others = [str(NodeAddress(_find_ip(node, asked), int(node[1]))) for node in nodes[1:]]
        slots.setdefault(primary, []).append(f"{first}-{last}" if first != last else str(first))
        replicas.setdefault(primary, {}).update(dict.fromkeys(others))
    return [
        PrimaryView(address=address, slots=tuple(ranges), replicas=tuple(map(ReplicaView, replicas[address])))
        for address, ranges in slots.items()
    ]


def merge_replicas(known: Sequence[ReplicaView], connected: Sequence[ReplicaView]) -> tuple[ReplicaView, ...]:
    """Return all known and connected replicas, each once."""
    by_address = {replica.address: replica for replica in (*known, *connected)}
    return tuple(by_address.values())


def _find_ip(node: Any, asked: NodeAddress) -> str:
    """Return the IP address of a node, also if the reply has its host name: primaries list replicas by IP address."""
    words = [word.decode() for word in node[3]] if len(node) > 3 else []
    others = dict(zip(words[::2], words[1::2], strict=False))
    return others.get("ip") or read_node_address(node, asked).host


def _count(text: str | None) -> int | None:
    number = read_whole(text or "", -1)
    return number if number >= 0 else None
