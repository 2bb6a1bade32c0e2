"""The inbox of a process whose broker is unreachable, in virtual time."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import pytest
import trio
import trio.testing

from celery5.broker.keys import Keys
from celery5.errors import BrokerUnavailable
from celery5.logs.log import Log
from celery5.services.commands.dispatcher import CommandRegistry
from celery5.services.commands.inbox import (
    Inbox,
    InboxAddress,
    SelfCommandQueue,
)


class UnreachableRedis:
    """A driver that fails each call, and records when it was made."""

    def __init__(self) -> None:
        self.call_times: list[float] = []

    async def perform(self, _call: Any) -> Any:
        self.call_times.append(trio.current_time())
        raise BrokerUnavailable("refused")


async def test_without_a_broker_own_commands_run_at_once_and_the_inbox_is_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    performed: list[tuple[str, float]] = []

    async def ping(parameters: Mapping[str, Any]) -> object:
        performed.append((parameters["sender"], trio.current_time()))
        return {}

    redis: Any = UnreachableRedis()
    keyring = cast("Any", None)  # nothing is signed
    keys, address = Keys("shop"), InboxAddress("shop", "w1", is_signed=False)
    self_commands = SelfCommandQueue(redis=redis, keys=keys, keyring=keyring, address=address)
    inbox = Inbox(
        redis=redis,
        command_counts=Counter(),
        performed_commands={},
        worker="w1",
        address=address,
        keyring=keyring,
        keys=keys,
        commands=CommandRegistry(handlers={"ping": ping}),
        self_commands=self_commands,
        log=Log(worker="w1", app="shop"),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(inbox.run)
        await trio.sleep(1.75)
        sent_at = trio.current_time()
        await self_commands.send("ping", {"sender": "step"})
        await trio.testing.wait_all_tasks_blocked()
        assert performed == [("step", sent_at)]
        start = redis.call_times[0]
        assert [at - start for at in redis.call_times] == pytest.approx([0, 0.5, 1, 1.5])
        nursery.cancel_scope.cancel()
