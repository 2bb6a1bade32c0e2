"""Waits for events: an index says which nodes of which runs wait for an event with certain values.

For each event that a workflow waits for, an internal task is subscribed to it. Its job looks up who waits, and gives
each the event as a signal, whose id follows from the event: so an event that comes twice is one signal.
"""

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec

from celery5.application import Application
from celery5.broker.calls import workflows as calls
from celery5.broker.driver import AsyncDriver
from celery5.errors import Misconfigured
from celery5.events.event import get_event_declaration
from celery5.protocol.workflows.plan import Known, Plan, decode_expression
from celery5.protocol.workflows.status import ENDED, RUN_STATES
from celery5.runners.context import current_job
from celery5.workflows.graph import decode_node, scan_all
from celery5.workflows.staging import NewRun
from celery5.workflows.values import RunValues, pick

EARLY_LIFE = 120.0
"""Seconds for which a run that is not started yet is in the index."""


class EventWaits:
    """The events that the workflows of an application wait for."""

    def __init__(self, app: Application) -> None:
        self._app = app
        # The sets of fields that waits compare, by event.
        self._compared: dict[str, set[tuple[str, ...]]] = {}

    def check(self, event: Any, where: Mapping[str, Any]) -> str:
        """Return the name of an event that a workflow waits for, and subscribe to it. Raises Misconfigured."""
        try:
            declaration = get_event_declaration(event)
        except (TypeError, AttributeError, KeyError):
            raise Misconfigured(
                f"flow.wait_for takes the name of a signal or an event of @app.event, got {event!r}"
            ) from None
        for name in where:
            if name not in declaration.fields:
                fields = ", ".join(declaration.fields) or "none"
                raise Misconfigured(
                    f"event {declaration.name} has no field {name!r} to wait for; it has: {fields}"
                )
        if declaration.name not in self._compared:
            self._compared[declaration.name] = set()
            self._subscribe(event, declaration.name)
        self._compared[declaration.name].add(tuple(sorted(where)))
        return str(declaration.name)

    def _subscribe(self, event: Any, name: str) -> None:
        async def deliver(**fields: Any) -> int:
            job = current_job()
            return await self.deliver(name, fields, job.id if job else "")

        deliver.__qualname__ = deliver.__name__ = f"deliver_{name}"
        app: Any = self._app
        event.subscribe(app.task(name=f"celery5.workflows.deliver:{name}")(deliver))

    async def deliver(self, event: str, fields: Mapping[str, Any], signal_id: str) -> int:
        """Give an event to the nodes that wait for it, from Trio. Returns how many runs took it."""
        redis = await self._app.connections.get_async_driver()
        encoded = {name: msgspec.json.encode(value) for name, value in fields.items()}
        value = msgspec.json.encode(fields).decode()
        taken = 0
        for names in sorted(self._compared.get(event, ())):
            index = make_index(event, {name: encoded.get(name, b"null") for name in names})
            for waiter in await redis.perform(calls.list_watches(self._app.keys, index)):
                home, run_id, node = waiter.rsplit(" ", 2)
                record = calls.pack_record("signal", run_id, f"event {node}", value, f"{signal_id} {node}")
                keys = self._app.queue(home)
                ttl = self._app.settings.results_ttl
                reply = await redis.perform(calls.advance(keys, [record], ttl=ttl))
                if int(reply.replies[0]) == 1:
                    taken += 1
                else:
                    await redis.perform(calls.remove_watch(self._app.keys, index, waiter))
        return taken

    async def prepare(self, redis: AsyncDriver, plan: Plan, new_run: NewRun) -> None:
        """Enter what a run that is about to start waits for, so that no event that comes early is missed."""
        for number in plan.waits:
            node = decode_node(plan.nodes[number])
            values: dict[str, bytes] = {}
            by_node = {plan.inputs[name]: raw for name, raw in (new_run.inputs or {}).items()}
            for name, plain in node["where"].get("fields", {}).items():
                expression = decode_expression(plain)
                if isinstance(expression, Known):
                    values[name] = expression.raw
                else:
                    values[name] = pick(by_node[plain[0]], plain[1:])
            index = make_index(node["where"]["event"], values)
            waiter = f"{plan.home} {new_run.run_id} {number}"
            await redis.perform(calls.add_watch(self._app.keys, index, waiter, life=EARLY_LIFE))

    async def watch(self, home: str, run_id: str, number: int, *, life: float) -> None:
        """Enter for `life` seconds what a node of a live run waits for, from Trio."""
        redis = await self._app.connections.get_async_driver()
        run = await redis.perform(calls.read_run(self._app.queue(home), run_id, ["state"]))
        if RUN_STATES.get(run.get("state", b"").decode()) in {None, *ENDED}:
            return
        index = await self._read_index(redis, home, run_id, number)
        await redis.perform(calls.add_watch(self._app.keys, index, f"{home} {run_id} {number}", life=life))

    async def unwatch(self, home: str, run_id: str) -> None:
        """Remove what a run has waited for, from Trio."""
        redis = await self._app.connections.get_async_driver()
        keys = self._app.queue(home)
        run = await scan_all(redis, partial(calls.scan_run, keys, run_id))
        for name in run:
            if name.startswith("watched:"):
                number = name.partition(":")[2]
                index = await self._read_index(redis, home, run_id, int(number))
                waiter = f"{home} {run_id} {number}"
                await redis.perform(calls.remove_watch(self._app.keys, index, waiter))

    async def _read_index(self, redis: AsyncDriver, home: str, run_id: str, number: int) -> str:
        values = RunValues(redis, self._app.queue(home))
        where = (await values.read_node(run_id, number))["where"]
        names = list(where.get("fields", {}))
        made = await values.make_all(run_id, [decode_expression(where["fields"][name]) for name in names])
        return make_index(where["event"], dict(zip(names, made, strict=True)))


def make_index(event: str, values: Mapping[str, bytes]) -> str:
    """Return the name of the index of those that wait for an event with these values, which are JSON."""
    canonical = {name: msgspec.json.decode(raw) for name, raw in sorted(values.items())}
    digest = sha256(msgspec.json.encode([event, canonical], order="deterministic")).hexdigest()[:24]
    return f"{event}:{digest}"
