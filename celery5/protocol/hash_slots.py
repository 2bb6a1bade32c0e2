"""The hash slots of a Redis Cluster: the slot of each key, the node of each slot, and what to do after a refusal."""

import re
from binascii import crc_hqx
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

SLOTS = 16384


class NodeAddress(msgspec.Struct, frozen=True, order=True):
    """Where a node of a cluster takes connections."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def get_key_slot(key: str | bytes) -> int:
    """Return the slot of a key: the hash of the text between its first braces if there is some, else of the key."""
    data = key.encode() if isinstance(key, str) else key
    start = data.find(b"{")
    if start >= 0:
        end = data.find(b"}", start + 1)
        if end > start + 1:
            data = data[start + 1 : end]
    return crc_hqx(data, 0) % SLOTS


class SlotMap(msgspec.Struct, frozen=True):
    """Which node is the primary of which slot."""

    # The first and the last slot of each range, in order, and its node.
    ranges: tuple[tuple[int, int, NodeAddress], ...] = ()
    # Slots that a node has said to be elsewhere since the ranges were read.
    moved: Mapping[int, NodeAddress] = msgspec.field(default_factory=dict[int, NodeAddress])

    def find_node(self, slot: int) -> NodeAddress | None:
        """Return the primary of a slot; None if no node serves it."""
        moved = self.moved.get(slot)
        if moved is not None:
            return moved
        low, high = 0, len(self.ranges)
        while low < high:
            middle = (low + high) // 2
            first, last, node = self.ranges[middle]
            if slot < first:
                high = middle
            elif slot > last:
                low = middle + 1
            else:
                return node
        return None

    @property
    def nodes(self) -> tuple[NodeAddress, ...]:
        """The primaries, sorted."""
        return tuple(sorted({*(node for _, _, node in self.ranges), *self.moved.values()}))

    def with_moved(self, slot: int, node: NodeAddress) -> "SlotMap":
        """Return the map in which this slot is on that node."""
        return msgspec.structs.replace(self, moved={**self.moved, slot: node})


def parse_slot_map(raw: Any, asked: NodeAddress) -> SlotMap:
    """Return the map of a reply to CLUSTER SLOTS.

    Args:
        raw: The reply. A node without a host is on the host that was asked.
        asked: The node that has sent it.

    Raises:
        ValueError: It is no such reply.
    """
    ranges: list[tuple[int, int, NodeAddress]] = []
    try:
        for first, last, primary, *_ in raw:
            ranges.append((int(first), int(last), read_node_address(primary, asked)))
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError("no reply to CLUSTER SLOTS") from error
    return SlotMap(tuple(sorted(ranges)))


def read_node_address(raw: Any, asked: NodeAddress) -> NodeAddress:
    """Return the address of a node in a reply to CLUSTER SLOTS, which `asked` has sent."""
    host = (raw[0] or b"").decode()
    return NodeAddress(asked.host if host in ("", "?") else host, int(raw[1]))


_REDIRECTION = re.compile(r"(MOVED|ASK) (\d{1,5}) (.*):(\d{1,5})$")


class Redirection(msgspec.Struct, frozen=True):
    """The refusal of a command whose slot is on another node."""

    # MOVED: for good. ASK: for this command, while the slot migrates.
    kind: Literal["MOVED", "ASK"]
    slot: int
    node: NodeAddress


def parse_redirection(text: str) -> Redirection | None:
    """Return the redirection in an error reply, such as `MOVED 3999 127.0.0.1:6381`; None for any other text.

    The host is empty if it is the host that was asked.
    """
    found = _REDIRECTION.match(text)
    if found is None:
        return None
    kind: Literal["MOVED", "ASK"] = "ASK" if found[1] == "ASK" else "MOVED"
    return Redirection(kind, int(found[2]), NodeAddress(found[3].strip("[]"), int(found[4])))


Refusal = Literal["moved", "ask", "unstable", "unreachable"]
"""Why a node did not perform a call: `unstable` while its slot migrates, or its cluster has no primary for it."""
NextStep = Literal["redirect", "ask", "refresh", "raise"]
"""`redirect`: send it to the node that was named, and read the map again meanwhile. `ask`: send it there with ASKING.
`refresh`: read the map again, and send it after a pause. `raise`: tell the caller."""
MAX_REDIRECTIONS = 16
"""How many times in a row a call may be sent to another node."""


def decide(refusal: Refusal, *, may_repeat: bool, attempt: int, is_late: bool) -> NextStep:
    """Return what to do with a call that a node has refused, or whose reply was lost.

    Args:
        refusal: Why the node did not perform the call.
        may_repeat: Whether the call has certainly not run, or may safely run twice.
        attempt: The number of attempts so far.
        is_late: Whether the time for attempts is over.
    """
    if is_late or attempt >= MAX_REDIRECTIONS * (1 if refusal in ("moved", "ask") else 100):
        return "raise"
    if refusal == "ask":
        return "ask"
    if refusal == "moved":
        return "redirect"
    return "refresh" if may_repeat else "raise"


def group_by_slot(keys: Iterable[str | bytes]) -> dict[int, list[Any]]:
    """Return the keys of each slot, in the order of `keys`."""
    groups: dict[int, list[Any]] = {}
    for key in keys:
        groups.setdefault(get_key_slot(key), []).append(key)
    return groups


_MANY_KEYS = frozenset({"MGET", "DEL", "UNLINK", "EXISTS"})
"""Commands whose words are all keys."""
_SUBCOMMAND_KEY = frozenset({"XGROUP", "XINFO", "OBJECT", "MEMORY"})
_KEYLESS = frozenset(
    {
        "PING",
        "TIME",
        "INFO",
        "WAIT",
        "SCAN",
        "CLIENT",
        "CONFIG",
        "ACL",
        "PUBLISH",
        "COMMAND",
        "DBSIZE",
        "SCRIPT",
    }
    | {"CLUSTER", "LATENCY", "SLOWLOG", "LASTSAVE", "ECHO", "MODULE", "ROLE"}
)


def find_keys(words: Sequence[Any]) -> Sequence[Any]:
    """Return the keys that decide which node performs a command; none if any node may perform it."""
    command = words[0]
    if command in ("EVALSHA", "EVAL", "EVALSHA_RO"):
        return words[3 : 3 + int(words[2])]
    if command in ("XREADGROUP", "XREAD"):
        start = _find_streams(words)
        return words[start : start + (len(words) - start) // 2]
    if command in _MANY_KEYS:
        return words[1:]
    if command in _SUBCOMMAND_KEY:
        return words[2:3]
    return () if command in _KEYLESS else words[1:2]


def _find_streams(words: Sequence[Any]) -> int:
    """Return the index of the first stream of a read. The names of group and worker before it may be any words."""
    return words.index("STREAMS", 4 if words[0] == "XREADGROUP" else 1) + 1


def with_block(words: tuple[Any, ...], block: float) -> tuple[Any, ...]:
    """Return the words of a read of streams that waits `block` seconds for the first entry; 0: it does not wait."""
    names = 4 if words[0] == "XREADGROUP" else 1
    end = _find_streams(words) - 1
    options = list(words[names:end])
    if "BLOCK" in options:
        at = options.index("BLOCK")
        del options[at : at + 2]
    wait = ("BLOCK", max(1, int(block * 1000))) if block else ()
    return (*words[:names], *options, *wait, *words[end:])


def split_words(words: Sequence[Any]) -> dict[int, tuple[Any, ...]]:
    """Return a command of several slots as one for each slot: a read of streams, or a command of many keys."""
    keys = find_keys(words)
    slots = group_by_slot(keys)
    if words[0] in _MANY_KEYS:
        return {slot: (words[0], *part) for slot, part in slots.items()}
    start = len(words) - 2 * len(keys)
    positions = dict(zip(keys, words[start + len(keys) :], strict=True))
    return {slot: (*words[:start], *part, *(positions[key] for key in part)) for slot, part in slots.items()}
