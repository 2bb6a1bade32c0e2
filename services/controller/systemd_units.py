"""Systemd units: a platform that runs each member of a cluster as a service of systemd, by D-Bus.

A member is up when its unit is active, after READY=1. Its unit's status is what it reports of itself. systemd's
watchdog ends a member that hangs; the time of its last heartbeat is polled. Members survive a Controller that
dies, and the next one adopts their units.
"""

import math
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    State,
    format_end_reason,
    parse_failure_reason,
)
from celery5.protocol.cluster.units import (
    SERVICE_INTERFACE,
    UNIT_INTERFACE,
    LaunchCommand,
    build_properties,
    format_environment_file,
    get_member_events,
    get_unit_name,
    get_unit_path,
    get_unit_pattern,
    parse_member_name,
    parse_state,
)
from celery5.protocol.job.retry_policy import full_jitter
from celery5.services.controller.systemd_bus import (
    SystemdBus,
    SystemdDisconnected,
    SystemdError,
    find_bus,
    get_runtime_folder,
    strip_types,
)

MAX_RECONNECT_DELAY = 5.0
"""The most seconds between two attempts to reconnect to the bus."""
BEAT_CHECKS = 5
"""Checks of a member's last heartbeat in the time after which it counts as hung."""
START_ATTEMPTS = 20
"""Attempts, a tenth of a second apart, to start a member whose former unit systemd still remembers."""
_UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"
_NO_SUCH_UNIT = ("org.freedesktop.systemd1.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject")


class _MemberUnit:
    """The unit of a member, and its last known state."""

    def __init__(self, unit: str, state: State, *, is_started: bool) -> None:
        self.unit = unit
        self.path = get_unit_path(unit)
        self.state: State = state
        # Until systemd starts it, its properties are those of the former process.
        self.is_started = is_started
        # Otherwise it belongs to another Controller, while this one stands by; its events are not reported.
        self.is_ours = not is_started
        # They hold the environment of this run and of former ones, never of the next one.
        self.environment_files: list[Path] = []
        # The properties of its service.
        self.properties: dict[str, Any] = {}
        self.status = ""
        self.reason = ""
        self.last_heartbeat = 0

    def begin(self) -> None:
        """Record that systemd has begun to start it."""
        self.is_started = True


class SystemdUnits(Platform):
    """Runs members as services of the user's systemd, or of the system's when run by root.

    Args:
        environ: the environment that members inherit.
        bus: the socket of the bus; '' for the usual one.

    Raises:
        PlatformError: there is no bus.
    """

    def __init__(
        self, *, cluster: Cluster, app: str, environ: Mapping[str, str] | None = None, bus: str = ""
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._cluster = cluster
        self._app = app
        self._bus = SystemdBus(bus or find_bus(self._environ))
        self._folder = get_runtime_folder(self._environ)
        self._units: dict[str, _MemberUnit] = {}
        self._paths: dict[str, str] = {}
        self._doubtful: set[str] = set()
        self._doubt_raised = trio.Event()
        self._report: Callable[[MemberEvent], None] = _ignore_event

    async def live(
        self,
        report: Callable[[MemberEvent], None],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled. Members that still run then go on, for the next Controller.

        A lost connection is tried again; only the first connection raises PlatformError.
        """
        self._report = report
        has_connected, attempt = False, 0

        def on_connected() -> None:
            nonlocal has_connected, attempt
            if not has_connected:
                task_status.started()
            has_connected, attempt = True, 0

        while True:
            try:
                await self._watch(on_connected)
            except SystemdDisconnected:
                if not has_connected:
                    raise
            attempt += 1
            await trio.sleep(full_jitter(attempt, start=0.1, cap=MAX_RECONNECT_DELAY, random=random.random))

    async def start(self, member: Member) -> None:
        """Begin to start the member. Raises PlatformError."""
        file = self._folder / f"{self._get_file_prefix(member.name)}.{secrets.token_hex(4)}.env"
        unit = get_unit_name(self._app, member.name)
        properties = build_properties(member, self._make_launch_command(file))
        member_unit = self._add_unit(member.name, _MemberUnit(unit, "starting", is_started=False))
        member_unit.environment_files = [*self._list_environment_files(member.name), file]
        try:
            self._write_environment(file, member)
            for attempts_left in reversed(range(START_ATTEMPTS)):
                try:
                    arguments: tuple[Any, ...] = (unit, "fail", properties, [])
                    await self._bus.call_manager(
                        "StartTransientUnit", "ssa(sv)a(sa(sv))", *arguments, on_done=member_unit.begin
                    )
                    return
                except SystemdError as error:
                    if error.name != _UNIT_EXISTS or not attempts_left:
                        raise
                with suppress(SystemdError):
                    await self._bus.call_manager("ResetFailedUnit", "s", unit)
                await trio.sleep(0.1)
        except PlatformError as error:
            if self._units.get(member.name) is member_unit:
                self._remove_unit(member.name)
            raise PlatformError(f"{member.name}: {error}") from None

    async def stop(self, name: str) -> None:
        """Stop the member by systemd: SIGTERM."""
        await self._call_for(name, "StopUnit", "ss", "replace")

    async def kill(self, name: str) -> None:
        """Send SIGKILL to the member's process.

        Its sidecar has a moment to put its jobs back before systemd kills the rest.
        """
        try:
            await self._call_for(name, "KillUnit", "ssi", "main", int(signal.SIGKILL))
        except SystemdError:  # it has no main process at the moment
            await self._call_for(name, "KillUnit", "ssi", "all", int(signal.SIGKILL))

    async def reload(self, name: str) -> None:
        """Send SIGHUP to the member's process."""
        await self._call_for(name, "KillUnit", "ssi", "main", int(signal.SIGHUP))

    def pid_of(self, name: str) -> int | None:
        """Return the process id of a member; None when it is not member_unit."""
        member_unit = self._units.get(name)
        return None if member_unit is None else int(member_unit.properties.get("MainPID", 0)) or None

    def outlives(self, _name: str) -> bool:
        """Return True: services survive the Controller."""
        return True

    async def living(self) -> Mapping[str, State]:
        """Return the members of this cluster that run. Raises PlatformError."""
        await self._refresh()
        started = {name: member_unit for name, member_unit in self._units.items() if member_unit.is_started}
        for name, member_unit in started.items():
            if not member_unit.is_ours:
                member_unit.is_ours, member_unit.environment_files = True, self._list_environment_files(name)
        return {name: member_unit.state for name, member_unit in started.items()}

    async def _call_for(self, name: str, method: str, signature: str, *body: Any) -> None:
        """Call a method about a member's unit, if it runs."""
        member_unit = self._units.get(name)
        if member_unit is None:
            return
        try:
            await self._bus.call_manager(method, signature, member_unit.unit, *body)
        except SystemdError as error:
            if error.name not in _NO_SUCH_UNIT:
                raise
            self._report_change(name, {"ActiveState": "inactive"})

    async def _watch(self, on_connected: Callable[[], None]) -> None:
        """Stay connected and watch members until the bus is lost. Raises SystemdDisconnected."""
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._bus.run, self._on_signal)
                await self._refresh()
                on_connected()
                nursery.start_soon(self._resolve_doubts)
                period = self._cluster.hung_after / BEAT_CHECKS or math.inf
                while True:
                    await trio.sleep(period)
                    for name in [
                        name for name, member_unit in self._units.items() if member_unit.state == "up"
                    ]:
                        await self._check_heartbeat(name)
        except BaseExceptionGroup as group:
            lost, others = group.split(SystemdDisconnected)
            if lost is None or others is not None:
                raise
            raise SystemdDisconnected(str(lost.exceptions[0])) from None

    async def _refresh(self) -> None:
        """List what runs: report members that have ended, and adopt unknown ones."""
        live = ["activating", "active", "reloading", "deactivating"]
        (units,) = await self._bus.call_manager(
            "ListUnitsByPatterns", "asas", live, [get_unit_pattern(self._app)]
        )
        listed = {parse_member_name(self._app, unit): (unit, active) for unit, _, _, active, *_ in units}
        listed.pop("", None)
        for name in [
            name for name, member_unit in self._units.items() if member_unit.is_started and name not in listed
        ]:
            self._doubtful.add(name)
        for name, (unit, active) in listed.items():
            state = parse_state(active)
            if name in self._units:
                self._report_change(name, {"ActiveState": active})
            elif state is not None:
                member_unit = self._add_unit(name, _MemberUnit(unit, state, is_started=True))
                with suppress(SystemdError):  # it has just ended, and systemd reports that
                    member_unit.properties["MainPID"] = await self._bus.get_property(
                        member_unit.path, SERVICE_INTERFACE, "MainPID"
                    )
        for name in tuple(self._doubtful):
            await self._refresh_member(name)

    async def _refresh_member(self, name: str) -> None:
        """Check a member that may have ended without a signal."""
        self._doubtful.discard(name)
        member_unit = self._units.get(name)
        if member_unit is None or not member_unit.is_started:
            return
        try:
            unit_properties = await self._bus.get_properties(member_unit.path, UNIT_INTERFACE)
            member_unit.properties.update(await self._bus.get_properties(member_unit.path, SERVICE_INTERFACE))
        except SystemdError:
            unit_properties = {"ActiveState": "inactive"}
        has_queued_job = (
            parse_state(str(unit_properties["ActiveState"])) is None
            and unit_properties.get("Job", (0,))[0] != 0
        )
        if self._units.get(name) is member_unit and not has_queued_job:
            self._report_change(name, {"ActiveState": unit_properties["ActiveState"]})

    async def _resolve_doubts(self) -> None:
        while True:
            await self._doubt_raised.wait()
            self._doubt_raised = trio.Event()
            for name in tuple(self._doubtful):
                await self._refresh_member(name)

    async def _check_heartbeat(self, name: str) -> None:
        """Report a heartbeat if there was one since the last check."""
        member_unit = self._units.get(name)
        if member_unit is None:
            return
        with suppress(SystemdError):  # it has just ended, and systemd reports that
            heartbeat = int(
                await self._bus.get_property(
                    member_unit.path, SERVICE_INTERFACE, "WatchdogTimestampMonotonic"
                )
            )
            if heartbeat != member_unit.last_heartbeat:
                member_unit.last_heartbeat = heartbeat
                self._report_event(member_unit, Beat(name))

    def _on_signal(self, path: str, signal_name: str, body: tuple[Any, ...]) -> None:
        """Handle one signal of systemd. Must not wait."""
        if signal_name == "PropertiesChanged":
            name = self._paths.get(path, "")
            if name and self._units[name].is_started:
                self._on_properties_changed(name, str(body[0]), strip_types(body[1]))
        elif signal_name == "JobRemoved" and body[3] != "done":
            self._mark_doubtful(parse_member_name(self._app, body[2]))
        elif signal_name == "UnitRemoved":
            name = parse_member_name(self._app, body[0])
            if name in self._units:
                self._report_change(name, {"ActiveState": "inactive"})

    def _on_properties_changed(self, name: str, interface: str, changed: dict[str, Any]) -> None:
        """Handle changed properties.

        Those of the service come first: they say how it ended, those of the unit that it has.
        """
        if interface == SERVICE_INTERFACE:
            member_unit = self._units[name]
            previous_status, status = member_unit.status, str(changed.pop("StatusText", ""))
            member_unit.properties.update(changed)
            if parse_failure_reason(status):
                member_unit.reason = parse_failure_reason(status)
            elif (
                status and status != previous_status
            ):  # each change repeats the status, also an unchanged one
                member_unit.status = status
                self._report_event(member_unit, Beat(name, status))
        elif interface == UNIT_INTERFACE and changed.get("StateChangeTimestampMonotonic") != 0:
            # It has been started.
            self._report_change(name, changed)

    def _mark_doubtful(self, name: str) -> None:
        """Have a member checked after an action on it failed."""
        if name in self._units:
            self._doubtful.add(name)
            self._doubt_raised.set()

    def _report_change(self, name: str, changed: Mapping[str, Any]) -> None:
        """Report the events that changed properties of a unit mean."""
        member_unit = self._units[name]
        if not member_unit.is_started:
            return
        events = get_member_events(
            name, member_unit.unit, {**member_unit.properties, **changed}, member_unit.state
        )
        member_unit.state = parse_state(str(changed.get("ActiveState", ""))) or member_unit.state
        for event in events:
            if isinstance(event, Ended):
                self._remove_unit(name)
                if event.code:
                    event = Ended(event.name, format_end_reason(event.how, member_unit.reason), event.code)
            self._report_event(member_unit, event)

    def _report_event(self, member_unit: _MemberUnit, event: MemberEvent) -> None:
        if member_unit.is_ours:
            self._report(event)

    def _add_unit(self, name: str, member_unit: _MemberUnit) -> _MemberUnit:
        self._units[name] = member_unit
        self._paths[member_unit.path] = name
        return member_unit

    def _remove_unit(self, name: str) -> None:
        self._doubtful.discard(name)
        member_unit = self._units.pop(name)
        self._paths.pop(member_unit.path, None)
        for file in member_unit.environment_files:
            with suppress(OSError):
                file.unlink()

    def _make_launch_command(self, environment: Path) -> LaunchCommand:
        return LaunchCommand(
            program=(sys.executable, "-m", "celery5"),
            directory=os.getcwd(),
            environment_file=str(environment),
            hung_after=self._cluster.hung_after,
            start_limit=self._cluster.start_limit,
        )

    def _get_file_prefix(self, name: str) -> str:
        # From the path, since the name of a unit has backslashes.
        return get_unit_path(get_unit_name(self._app, name)).rpartition("/")[2]

    def _list_environment_files(self, name: str) -> list[Path]:
        """Return the environment files of this member.

        Each start has its own file: another Controller may learn late of an end, and must not remove the file
        of the next start.
        """
        return [
            file
            for file in self._folder.glob("*.env")
            if file.name.startswith(f"{self._get_file_prefix(name)}.")
        ]

    def _write_environment(self, path: Path, member: Member) -> None:
        """Write the environment file. Raises PlatformError."""
        text = format_environment_file({**self._environ, **member.environment})
        try:
            make_private(self._folder)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w", encoding="utf-8", errors="surrogateescape") as to:
                to.write(text)
        except OSError as error:
            raise PlatformError(f"cannot write {path}, which has its environment: {error.strerror}") from None


def _ignore_event(_event: MemberEvent) -> None:
    """Ignore an event: nothing listens yet."""
