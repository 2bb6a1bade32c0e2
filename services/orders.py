"""Orders: posts signed commands to the inboxes of other processes, and waits for no answer.

Floor: services. Reads: the keys that commands are signed with. Writes: inboxes; log messages.
"""

import time
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from celery5.broker import inbox as trips
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, CommandRefused, Misconfigured
from celery5.log import Log
from celery5.protocol.job import new_id
from celery5.protocol.signing import (
    MAX_COMMAND_LIFETIME,
    ControlCommand,
    Signer,
    format_audience,
    sign_command,
)
from celery5.services.inbox import InboxAddress

T = TypeVar("T")


class Redis(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[T], /) -> T: ...


class SigningKeys(Protocol):
    """Who signs here."""

    def get_signer(self) -> Signer: ...


class CommandSender:
    """The commands of this process to others. What cannot be posted is logged, once until something can."""

    def __init__(
        self, *, redis: Redis, keys: Keys, keyring: SigningKeys, address: InboxAddress, log: Log
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._keyring = keyring
        self._address = address
        self._log = log
        self._thread = trio.CapacityLimiter(1)
        self._why = ""

    async def send(
        self,
        inbox: str,
        command: str,
        parameters: Mapping[str, Any],
        /,
        *,
        expires: float = MAX_COMMAND_LIFETIME,
    ) -> bool:
        """Have the process of that inbox do it soon, within `expires` seconds (60 at most). False when it could not be
        posted: its inbox is full, Redis is away, or there are no keys to sign with."""
        now = time.time()
        try:
            order = ControlCommand(
                id=new_id(),
                audience=format_audience(self._address.app, inbox),
                issued=now,
                expires=now + min(expires, MAX_COMMAND_LIFETIME),
                command=command,
                parameters=dict(parameters),
                sender=self._address.name,
            )
            sealed = await trio.to_thread.run_sync(self._sealed, order, limiter=self._thread)
            posted = await self._redis.perform(trips.send_command(self._keys, inbox, order.id, sealed))
            why = "" if posted else "its inbox is full"
        except (BrokerError, CommandRefused, Misconfigured, OSError, ValueError) as error:
            why = str(error)
        if why and why != self._why:
            self._log.event("command:send-failed", "warning", to=inbox, command=command, why=why)
        self._why = why
        return not why

    def _sealed(self, order: ControlCommand) -> bytes:
        """In a thread: files are read, and the first time libraries are imported."""
        signer = self._keyring.get_signer() if self._address.is_signed else None
        now = time.time()  # a folder of keys that was made just now takes nothing that is older
        life = order.expires - order.issued  # first: a sum of two times would be rounded
        fresh = msgspec.structs.replace(order, issued=now, expires=now + life)
        return sign_command(fresh, signer)
