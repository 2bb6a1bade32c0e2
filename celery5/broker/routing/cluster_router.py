"""One driver for a Redis Cluster, in any colour: each call goes to the node that has the slot of its keys.

`protocol/hash_slots.py` decides what a refusal means. A node that refuses a call has not performed it: it names the
node that has the slot, or asks to try again. The call is then sent again, for up to `RETRY_FOR` seconds. After that
it raises BrokerUnavailable, as for a server that cannot be reached, and callers treat both in the same way.

The router adds one key, which does not exist, to those that a script declares. While a slot is moved key by key, a node
refuses a call with several keys if one of them is missing there. So such a script is refused before it begins. A script
that began could fail in the middle, at the first computed key that its node does not have. Or it could create that key
a second time, while the original is still on the other node.

On nodes from 7.0 scripts publish by SPUBLISH, since PUBLISH sends a message to all nodes. The channel must be in the
slot of the script's keys. For a channel in another slot, the script writes "PUBLISH" in double
quotes (`keys.is_broadcast`).
"""

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar, cast

from msgspec.structs import replace

from celery5.broker.call import Call, Script
from celery5.broker.colour import SettableEvent, current_colour, make_event, sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import get_absent_key
from celery5.broker.routing.broker_router import run_all_async
from celery5.broker.translate import SlotRedirected, SlotUnstable
from celery5.errors import BrokerDenied, BrokerError, BrokerReadOnly, BrokerUnavailable, BrokerUnsupported
from celery5.protocol.hash_slots import (
    NodeAddress,
    Refusal,
    SlotMap,
    decide,
    find_keys,
    get_key_slot,
    parse_slot_map,
    split_words,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.similar_names import join_names

T = TypeVar("T")

RETRY_FOR = 1.0
"""Seconds for which a call is tried again while its slot migrates, or its node cannot be reached."""
PAUSE_START, PAUSE_CAP = 0.02, 0.25
"""The first and the longest pause between two attempts, in seconds."""
SCAN_BASE = 1024
"""The most nodes that a cursor of SCAN can distinguish."""

_ASKING: Call[object] = Call(("ASKING",), lambda reply: reply, repeatable=True)
_SLOTS: Call[Any] = Call(("CLUSTER", "SLOTS"), lambda reply: reply, repeatable=True)
_REFUSED = (SlotRedirected, BrokerUnavailable)


class NodeDriver(AsyncDriver, Protocol):
    """The driver of one node. The drivers of event loops implement it; `BlockingRedis` needs an adapter."""

    async def perform_each(self, calls: Sequence[Call[T]], /) -> list[T | BrokerError]:
        """Perform several calls in one write; return the reply of each, or its error."""
        ...


class ClusterMap:
    """The map of slots to nodes that this process knows, and how to read it again.

    Args:
        endpoint: The cluster.
        get_driver: Returns the driver of a node.
        forget: Called with the primaries after each reading: connections to other nodes are not needed any more.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        get_driver: Callable[[NodeAddress], Awaitable[NodeDriver]],
        forget: Callable[[Iterable[NodeAddress]], None] = lambda _nodes: None,
    ) -> None:
        self.seeds = tuple(NodeAddress(host, port) for host, port in endpoint.nodes)
        self.slots = SlotMap()
        self._where = endpoint.masked_url
        self._endpoint = endpoint
        self._get_driver = get_driver
        self._forget = forget
        self._read: SettableEvent | None = None  # set when the reading that is under way has ended

    @property
    def nodes(self) -> tuple[NodeAddress, ...]:
        """The primaries, as far as they are known; before that, the nodes that the URL names."""
        return self.slots.nodes or self.seeds

    async def find_node(self, slot: int | None) -> NodeAddress:
        """Return the node of a slot; None: any of them. Raises BrokerUnavailable if no node serves the slot."""
        if not self.slots.ranges:
            await self.read()
        node = self.slots.nodes[0] if slot is None else self.slots.find_node(slot)
        if node is None:
            raise SlotUnstable(f"broker {self._where}: no node serves the slot {slot}; try again soon")
        return node

    async def note_moved(self, slot: int, node: NodeAddress) -> None:
        """Record that a slot is on another node than the map says, and ask that node for the whole map."""
        if self.slots.find_node(slot) != node:
            self.slots = self.slots.with_moved(slot, node)
            try:
                await self.read(first=node)
            except BrokerUnavailable:
                return
            if self.slots.find_node(slot) != node:
                self.slots = self.slots.with_moved(slot, node)

    async def read(self, *, first: NodeAddress | None = None, last: NodeAddress | None = None) -> None:
        """Read the map from any node that answers. In an event loop there is one reading at a time: others wait for it.

        In plain Python each thread reads for itself: a signal handler may have interrupted another reading.

        Args:
            first: The node to ask first.
            last: The node to ask only if no other answers.

        Raises:
            BrokerError: No node answers.
        """
        if current_colour() is None:
            return await self._read_from_any(first, last)
        if self._read is not None:
            await self._read.wait()
            if self.slots.ranges:
                return None
        done = self._read = make_event()
        try:
            return await self._read_from_any(first, last)
        finally:
            self._read = None
            done.set()

    async def _read_from_any(self, first: NodeAddress | None, last: NodeAddress | None) -> None:
        nodes = list({*self.slots.nodes, *self.seeds})
        random.shuffle(nodes)
        order = [*([first] if first else []), *(node for node in nodes if node not in (first, last))]
        failure: BrokerError | None = None
        for node in [*order, *([last] if last else [])]:
            try:
                slots = parse_slot_map(await (await self._get_driver(node)).perform(_SLOTS), node)
            except ValueError:
                continue
            except BrokerDenied as error:
                raise self._denied(error) from error
            except BrokerError as error:
                if not isinstance(error, BrokerUnavailable):
                    raise
                failure = failure or error
                continue
            if slots.ranges:
                self.slots = slots
                self._forget(slots.nodes)
                return
        raise failure or BrokerUnavailable(f"broker {self._where}: its nodes serve no slots")

    def _denied(self, error: BrokerDenied) -> BrokerError:
        """Return the error when the user may not ask for the slots: the URL may be meant for a single server."""
        if not self._endpoint.found_through:
            return error
        return BrokerUnsupported(
            f"broker {self._where} is part of a Redis Cluster, and its user may not ask for the slots: extend the "
            f"user's ACL as `celery5 acl` says ({error})"
        )


class ClusterRouter:
    """Performs calls on the nodes of a cluster, in any colour that `get_driver` fits."""

    def __init__(
        self,
        endpoint: Endpoint,
        get_driver: Callable[[NodeAddress], Awaitable[NodeDriver]],
        forget: Callable[[Iterable[NodeAddress]], None] = lambda _nodes: None,
    ) -> None:
        self.map = ClusterMap(endpoint, get_driver, forget)
        self._get_driver = get_driver
        self._where = endpoint.masked_url

    async def perform(self, call: Call[T]) -> T:
        """Perform a call on the node of its keys. Raises BrokerError."""
        call = guard_script(call)
        slots = self._find_slots(call)
        if len(slots) > 1:
            return await self._perform_split(call)
        if call.words[0] == "SCAN":
            return await self._scan(call)
        if call.merge is not None and not slots:
            return await self._perform_on_all(call)
        slot = slots[0] if slots else None
        node: NodeAddress | None = None
        try:
            node = await self.map.find_node(slot)
            return await (await self._get_driver(node)).perform(call)
        except _REFUSED as error:
            return await self._perform_again(call, slot, node, error)

    async def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls: those for one node in one write, on all nodes at the same time.

        A call without keys goes where the call before it goes. The first error is raised when all have ended.
        """
        if not calls:
            return []
        replies = await self.perform_each(calls)
        failure = next((reply for reply in replies if isinstance(reply, BrokerError)), None)
        if failure is None:
            return [reply for reply in replies if not isinstance(reply, BrokerError)]
        if any(not isinstance(reply, BrokerError) for reply in replies):
            failure.mark_maybe_done()
        raise failure

    async def perform_each(self, calls: Sequence[Call[T]]) -> list[T | BrokerError]:
        """Perform several calls; return the reply of each, or its error."""
        calls = [guard_script(call) for call in calls]
        replies: dict[int, T | BrokerError] = {}
        parts: dict[NodeAddress, list[tuple[int, int | None]]] = {}
        node: NodeAddress | None = None
        for index, call in enumerate(calls):
            slots = self._find_slots(call)
            try:
                if len(slots) > 1:
                    replies[index] = await self._perform_split(call)
                    continue
                if call.merge is not None and not slots:
                    replies[index] = await self._perform_on_all(call)
                    continue
                if slots or node is None:
                    node = await self.map.find_node(slots[0] if slots else None)
            except BrokerError as error:
                replies[index] = error
                continue
            parts.setdefault(node, []).append((index, slots[0] if slots else None))
        outcomes = (
            await run_all_async(
                [
                    partial(self._perform_part, node, [calls[at] for at, _ in part])
                    for node, part in parts.items()
                ]
            )
            if parts
            else []
        )
        for (node, part), outcome in zip(parts.items(), outcomes, strict=True):
            for at, (index, slot) in enumerate(part):
                reply = outcome if isinstance(outcome, BrokerError) else outcome[at]
                if isinstance(reply, _REFUSED):
                    try:
                        reply = await self._perform_again(calls[index], slot, node, reply)
                    except BrokerError as error:
                        reply = error
                replies[index] = reply
        return [replies[index] for index in range(len(calls))]

    async def perform_again(self, call: Call[T], error: BrokerError) -> T:
        """Perform a call that a node has refused with this error, or raise it."""
        call = guard_script(call)
        slots = self._find_slots(call)
        if not isinstance(error, _REFUSED):
            raise error
        return await self._perform_again(call, slots[0] if slots else None, None, error)

    async def _perform_part(self, node: NodeAddress, calls: Sequence[Call[Any]]) -> list[Any]:
        return await (await self._get_driver(node)).perform_each(calls)

    async def _perform_again(
        self,
        call: Call[T],
        slot: int | None,
        node: NodeAddress | None,
        error: SlotRedirected | BrokerUnavailable,
    ) -> T:
        """Send a call again that was refused, or whose reply was lost, while `decide` allows it; else raise."""
        late_at = time.monotonic() + RETRY_FOR
        attempt, may_have_run = 0, False
        while True:
            attempt += 1
            may_have_run = may_have_run or error.maybe_done
            redirection = error.redirection if isinstance(error, SlotRedirected) else None
            refusal = _classify(error, call)
            step = decide(
                refusal,
                may_repeat=call.repeatable or not error.maybe_done,
                attempt=attempt,
                is_late=refusal in ("unstable", "unreachable") and time.monotonic() >= late_at,
            )
            if step == "raise" or (step != "refresh" and redirection is None):
                if isinstance(error, SlotRedirected):  # its class says that the URL is wrong
                    error = SlotUnstable(
                        f"broker {self._where}: the slot {slot} is being moved; try again soon"
                    )
                if may_have_run:
                    error.mark_maybe_done()
                raise error
            try:
                if step == "refresh" or redirection is None:
                    is_unstable = isinstance(error, SlotUnstable | SlotRedirected)
                    await self._refresh(slot, node, attempt, is_unstable=is_unstable)
                    node = await self.map.find_node(slot)
                    return await (await self._get_driver(node)).perform(call)
                named = redirection.node
                if not named.host:
                    named = NodeAddress((node or self.map.nodes[0]).host, named.port)
                if step == "ask":
                    return await self._ask(call, named)
                await self.map.note_moved(redirection.slot, named)
                node = named
                return await (await self._get_driver(node)).perform(call)
            except _REFUSED as refused:
                error = refused

    async def _refresh(
        self, slot: int | None, node: NodeAddress | None, attempt: int, *, is_unstable: bool
    ) -> None:
        """Read the map again, and wait a moment unless another node has the slot now."""
        await self.map.read(last=node)
        if is_unstable or slot is None or self.map.slots.find_node(slot) == node:
            await sleep(
                full_jitter(attempt, start=PAUSE_START, cap=PAUSE_CAP, random=random.random) + PAUSE_START
            )

    async def _ask(self, call: Call[T], node: NodeAddress) -> T:
        """Send a call to the node to which its slot migrates."""
        asked: list[Call[Any]] = [_ASKING, call]
        _, reply = await (await self._get_driver(node)).perform_each(asked)
        if isinstance(reply, BrokerError):
            raise reply
        return cast("T", reply)

    def _find_slots(self, call: Call[Any]) -> list[int]:
        """Return the slots of the keys of a call, each once.

        Raises:
            BrokerUnsupported: A script has keys of several slots.
        """
        keys = find_keys(call.words)
        if len(keys) == 1:
            return [get_key_slot(keys[0])]
        slots = list(dict.fromkeys(map(get_key_slot, _with_different_tags(keys))))
        if len(slots) > 1 and call.script is not None:
            raise BrokerUnsupported(
                f"broker {self._where} is a Redis Cluster, where the script {call.script.name} cannot have keys of "
                f"several slots ({join_names(map(str, keys), 3)})"
            )
        return slots

    async def _perform_split(self, call: Call[T]) -> T:
        """Perform a call on each of its slots, and return the value of all replies together."""
        keys = find_keys(call.words)
        parts = [
            Call(words, lambda raw: raw, repeatable=call.repeatable)
            for words in split_words(call.words).values()
        ]
        return call.decode(join_replies(call.words[0], keys, parts, await self.perform_all(parts)))

    async def _perform_on_all(self, call: Call[T]) -> T:
        """Perform a call without keys on each primary, and return the value of all replies together."""
        assert call.merge is not None
        await self.map.find_node(None)
        outcomes = await run_all_async(
            [partial(self._perform_part, node, [call]) for node in self.map.slots.nodes]
        )
        replies: list[T] = []
        for outcome in outcomes:
            reply = outcome if isinstance(outcome, BrokerError) else outcome[0]
            if isinstance(reply, BrokerError):
                raise reply
            replies.append(reply)
        return call.merge(replies)

    async def _scan(self, call: Call[T]) -> T:
        """Perform SCAN on one node after the other: the cursor contains the number of the node."""
        cursor, number = divmod(int(call.words[1]), SCAN_BASE)
        await self.map.find_node(None)
        nodes = self.map.nodes
        if number >= len(nodes):
            return call.decode([b"0", []])
        words = (call.words[0], cursor, *call.words[2:])
        driver = await self._get_driver(nodes[number])
        raw: Any = await driver.perform(Call(words, lambda raw: raw, repeatable=True))
        following = int(raw[0])
        if following:
            following = following * SCAN_BASE + number
        elif number + 1 < len(nodes):
            following = number + 1
        return call.decode([b"%d" % following, raw[1]])


_WITHOUT_LAST_KEY = "KEYS[#KEYS] = nil "
# Only servers that know SPUBLISH tell scripts their version.
_CHOOSE_PUBLISH = "local PUBLISH = redis.REDIS_VERSION_NUM and 'SPUBLISH' or 'PUBLISH' "


@cache
def _adapt_script(script: Script) -> Script:
    """Return a script without its last key, which publishes in its slot. Its lines keep their numbers."""
    body = script.body
    if "'PUBLISH'" in body:
        body = _CHOOSE_PUBLISH + body.replace("'PUBLISH'", "PUBLISH")
    return Script.of(script.name, _WITHOUT_LAST_KEY + body)


def guard_script(call: Call[T]) -> Call[T]:
    """Return the call of a script with one additional key, which is hidden from the script; other calls unchanged."""
    script, words = call.script, call.words
    if script is None or not words[2] or script.body.startswith(_WITHOUT_LAST_KEY):
        return call
    script, end = _adapt_script(script), 3 + int(words[2])
    keys = (*words[3:end], get_absent_key(str(words[3])))
    return replace(call, script=script, words=(words[0], script.sha, len(keys), *keys, *words[end:]))


def _classify(error: BrokerError, call: Call[Any]) -> Refusal:
    if isinstance(error, SlotRedirected):
        if error.redirection.kind == "MOVED":
            return "moved"
        # A script has several keys: after ASKING a node would answer TRYAGAIN.
        return "ask" if call.script is None else "unstable"
    return "unstable" if isinstance(error, SlotUnstable | BrokerReadOnly) else "unreachable"


def _with_different_tags(keys: Sequence[Any]) -> Iterable[Any]:
    """Yield one key for each hash tag: the many keys of one queue have the same tag."""
    tags: set[Any] = set()
    for key in keys:
        text = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
        start = text.find("{")
        tag = text[start : text.find("}", start)] if start >= 0 else text
        if tag not in tags:
            tags.add(tag)
            yield text


def join_replies(
    command: Any, keys: Sequence[Any], parts: Sequence[Call[Any]], replies: Sequence[Any]
) -> Any:
    """Combine the raw replies to the parts of a command of several slots into one reply."""
    if command == "MGET":
        by_key = {
            key: value
            for part, reply in zip(parts, replies, strict=True)
            for key, value in zip(part.words[1:], reply, strict=True)
        }
        return [by_key[key] for key in keys]
    if command in ("XREADGROUP", "XREAD"):
        return [
            entry
            for reply in replies
            for entry in (reply.items() if hasattr(reply, "items") else reply or ())
        ]
    return sum(replies)
