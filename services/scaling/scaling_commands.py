"""Scaling commands: send workers and Controllers what was decided for them, no more often than needed.

A command to a worker holds for some minutes and is repeated before that is over: when all Schedulers are gone,
workers return to normal. A worker with several brokers gets commands in the inbox of each of its incarnations.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import trio

from celery5.broker.calls import commands as trips
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError, CommandRefused, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import (
    CONCURRENCY,
    MAX_COMMAND_LIFETIME,
    PREFER,
    PREFETCH,
    SCALE,
    CommandDefinition,
    get_inbox_name,
)
from celery5.protocol.commands.signing import ControlCommand, Signer, format_audience, sign_command
from celery5.protocol.job.job import new_id
from celery5.protocol.scaling.autoscale import AutoscaleState
from celery5.protocol.scaling.prioritisation import Preference
from celery5.protocol.scaling.snapshot import ClusterSnapshot, ClusterWorker
from celery5.services.commands.inbox import InboxAddress


class SigningKeys(Protocol):
    """The keys that this process signs with."""

    def get_signer(self) -> Signer: ...


class CommandSender:
    """Sends control commands of this process to others.

    Logs the first failure, until a command can be sent again.
    """

    def __init__(
        self, *, redis: AsyncDriver, keys: Keys, keyring: SigningKeys, address: InboxAddress, log: Log
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
        """Send a command to the process of that inbox, to run within `expires` seconds (60 at most).

        Returns False when it was not sent: the inbox is full, Redis is unreachable, or there are no keys to
        sign with.
        """
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
        """Sign the command. Runs in a thread, since it reads files and imports libraries."""
        signer = self._keyring.get_signer() if self._address.is_signed else None
        now = time.time()  # a folder of keys that was created just now accepts nothing older
        lifetime = order.expires - order.issued  # computed first: a sum of two times would be rounded
        fresh = msgspec.structs.replace(order, issued=now, expires=now + lifetime)
        return sign_command(fresh, signer)


COMMAND_TTL = 300.0
"""Seconds for which a worker follows a command."""
RENEW_INTERVAL = 120.0
"""Seconds after which a command is repeated, to Controllers as well."""
MIN_COMMAND_INTERVAL = 10.0
"""The least seconds between two commands of one kind to one process."""
MAX_NAMED_TASKS = 200
"""The most tasks, and queues, in one command: those of the least weight, as the others are preferred anyway."""


class ScalingCommandSender(Protocol):
    """Sends signed control commands."""

    async def send(self, inbox: str, command: str, parameters: Mapping[str, Any], /) -> bool: ...


class ScalingCommands:
    """Sends the decisions of an autoscaler and remembers what each recipient has."""

    def __init__(self, *, command_sender: ScalingCommandSender, log: Log) -> None:
        self._command_sender = command_sender
        self._log = log
        self._sent_factors: dict[tuple[str, str], tuple[float, float]] = {}
        """The last factor of each command to each worker, and when it was sent."""
        self._sent_preferences: dict[str, tuple[Preference, float]] = {}
        self._sent_workers: dict[str, tuple[int, float]] = {}
        self._has_no_controller = False

    def reset(self) -> None:
        """Forget what was sent: another Scheduler may have sent other commands."""
        self._sent_factors.clear()
        self._sent_preferences.clear()
        self._sent_workers.clear()

    async def send_changes(
        self,
        snapshot: ClusterSnapshot,
        state: AutoscaleState | None,
        preference: Preference,
        controllers: Sequence[str],
    ) -> None:
        """Send each recipient what it does not know yet."""
        targets = [target for worker in snapshot.workers for target in worker.command_targets]
        names = {command_target.name for command_target in targets}
        for gone in self._sent_preferences.keys() - names:
            del self._sent_preferences[gone]
        for sent in [sent for sent in self._sent_factors if sent[1] not in names]:
            del self._sent_factors[sent]
        for target in targets:
            if state is not None:
                prefetch = state.get_prefetch(target.queues)
                await self._send_factor(target.name, PREFETCH, target.prefetch, prefetch)
                await self._send_factor(target.name, CONCURRENCY, target.concurrency, state.concurrency)
            await self._send_preference(target, preference)
        # where not all workers are seen, a number that was never decided may be too small
        other = state is not None and state.workers != len(snapshot.workers) and not snapshot.unreachable
        if state is not None and (state.at or other):
            await self._send_workers(state.workers, sorted(controllers))

    async def _send_factor(
        self, worker: str, command: CommandDefinition[Any], reported: float, factor: float
    ) -> None:
        """Send a worker a factor, unless it has reported the same and need not be reminded."""
        sent, at = self._sent_factors.get((command.name, worker), (0.0, -RENEW_INTERVAL))
        passed = trio.current_time() - at
        known = reported == factor and (factor == 1 or passed < RENEW_INTERVAL)
        if known or (sent == factor and passed < MIN_COMMAND_INTERVAL):
            return
        parameters = {"factor": factor, "seconds": COMMAND_TTL}
        if await self._command_sender.send(get_inbox_name(worker), command.name, parameters):
            self._sent_factors[command.name, worker] = (factor, trio.current_time())

    async def _send_preference(self, member: ClusterWorker, preference: Preference) -> None:
        sent, at = self._sent_preferences.get(member.name, (Preference(), -RENEW_INTERVAL))
        passed = trio.current_time() - at
        if passed < MIN_COMMAND_INTERVAL or not (
            sent.differs_from(preference) or (not sent.is_neutral and passed >= RENEW_INTERVAL)
        ):
            return
        weights = {"tasks": _lightest(preference.tasks), "queues": _lightest(preference.queues)}
        if await self._command_sender.send(
            get_inbox_name(member.name), PREFER.name, {**weights, "seconds": COMMAND_TTL}
        ):
            self._sent_preferences[member.name] = (preference, trio.current_time())

    async def _send_workers(self, workers: int, controllers: Sequence[str]) -> None:
        """Send each Controller its share of all workers."""
        if not controllers and not self._has_no_controller:
            self._log.event("autoscale:not-applied", "info", workers=workers, hint=_ALONE)
        self._has_no_controller = not controllers
        for gone in self._sent_workers.keys() - set(controllers):
            del self._sent_workers[gone]
        for place, name in enumerate(controllers):
            share = workers // len(controllers) + (place < workers % len(controllers))
            await self._send_to_controller(name, share, workers)

    async def _send_to_controller(self, name: str, share: int, workers: int) -> None:
        """Send one Controller its share.

        Repeat it from time to time: the Controller may have been frozen, or without keys.
        """
        sent, at = self._sent_workers.get(name, (-1, 0.0))
        if sent == share and trio.current_time() - at < RENEW_INTERVAL:
            return
        if await self._command_sender.send(
            get_inbox_name(name), SCALE.name, {"workers": share, "of": workers}
        ):
            self._sent_workers[name] = (share, trio.current_time())
            if sent != share:
                self._log.event("autoscale:commanded", "info", controller=name, workers=share, of=workers)


def _lightest(weights: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(weights.items(), key=lambda item: item[1])[:MAX_NAMED_TASKS])


_ALONE = "no Controller lives that could begin or end workers: begin or end them yourself"
