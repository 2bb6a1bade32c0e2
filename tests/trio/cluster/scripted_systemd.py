"""Scripted Systemd: a peer on a real dbus-daemon that answers as systemd's manager, with what a real one has said.

The script was recorded from systemd 252 as the first process of a throw-away machine, of members that start, that are
refused, killed, stopped, that hang and that end by themselves: each signal in its order. Only names and paths are put
in, and of the properties those are left that matter here.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageType,
    new_error,
    new_method_call,
    new_method_return,
    new_signal,
)
from jeepney.io.trio import DBusConnection, open_dbus_connection

from celery5.protocol.cluster.units import get_unit_path
from celery5.services.controller.systemd_bus import MANAGER, MANAGER_PATH, PROPERTIES, SYSTEMD

SCRIPT: dict[str, list[list[Any]]] = json.loads((Path(__file__).parent / "systemd_252.json").read_text())
_CONFIGURATION = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy>
</busconfig>"""
SERVICE = "org.freedesktop.systemd1.Service"


@contextmanager
def dbus_daemon() -> Iterator[str]:
    """A bus of our own; gives its socket. Skips the test where there is no dbus-daemon."""
    if not shutil.which("dbus-daemon"):
        pytest.skip("dbus-daemon is not installed here")
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:  # a socket's path is short
        bus, configuration = Path(folder, "bus"), Path(folder, "bus.conf")
        configuration.write_text(_CONFIGURATION.format(path=bus))
        with subprocess.Popen(
            ["dbus-daemon", f"--config-file={configuration}", "--nofork", "--nosyslog", "--print-address=1"],
            stdout=subprocess.PIPE,
        ) as daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline(), "it prints its address once it listens"
            try:
                yield str(bus)
            finally:
                daemon.kill()


class ScriptedSystemd:
    """What systemd's manager is, to whoever asks it on the bus. `asked` is what it was asked, `units` how its units
    are. A member whose name has `bad` in it ends as soon as it was started, one with `ghost` has no program."""

    def __init__(self, line: DBusConnection) -> None:
        self._line = line
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.units: dict[str, dict[str, Any]] = {}
        self.beats = 0
        self.deaf: set[str] = set()

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            message = await self._line.receive()
            if message.header.message_type is MessageType.method_call:
                await self._answer(message)

    async def play(self, scene: str, unit: str, call: Message | None = None) -> None:
        """Say what a real one has said, in that order."""
        script = json.dumps(SCRIPT[scene]).replace("{path}", get_unit_path(unit))
        script = script.replace("{unit}", json.dumps(unit)[1:-1]).replace("{job}", f"{MANAGER_PATH}/job/7")
        for message in json.loads(script):
            if message == ["reply"]:
                if call is not None:
                    job: tuple[Any, Any] = (
                        ("o", (f"{MANAGER_PATH}/job/7",)) if scene in _WITH_A_JOB else (None, ())
                    )
                    await self._line.send(new_method_return(call, *job))
                continue
            path, name, signature, said = message
            body = _as_sent(said)
            self._note(unit, name, body)
            interface = PROPERTIES if name == "PropertiesChanged" else MANAGER
            await self._line.send(new_signal(DBusAddress(path, interface=interface), name, signature, body))

    async def change(self, unit: str, **properties: tuple[str, Any]) -> None:
        """Say that properties of a service have changed."""
        body: tuple[Any, ...] = (SERVICE, properties, [])
        emitter = DBusAddress(get_unit_path(unit), interface=PROPERTIES)
        await self._line.send(new_signal(emitter, "PropertiesChanged", "sa{sv}as", body))

    def _note(self, unit: str, name: str, body: Any) -> None:
        if name == "PropertiesChanged":
            self.units.setdefault(unit, {}).update(body[1])
        elif name == "UnitRemoved":
            self.units.pop(unit, None)

    async def _answer(self, call: Message) -> None:
        fields = call.header.fields
        method, body = str(fields[HeaderFields.member]), call.body
        self.asked.append((method, body))
        if method in self.deaf:
            return
        if method == "StartTransientUnit" and body[0] in self.units:
            text = f"Unit {body[0]} was already loaded or has a fragment file."
            await self._line.send(new_error(call, f"{SYSTEMD}.UnitExists", "s", (text,)))
        elif method == "StartTransientUnit":
            scene = "refused" if "bad" in body[0] else "not started" if "ghost" in body[0] else "start"
            await self.play(scene, body[0], call)
        elif method in ("StopUnit", "KillUnit") and body[0] not in self.units:
            await self._line.send(
                new_error(call, f"{SYSTEMD}.NoSuchUnit", "s", (f"Unit {body[0]} not loaded.",))
            )
        elif method == "StopUnit":
            await self.play("stopped", body[0], call)
        elif method == "KillUnit" and body[2] == 9:
            await self.play("killed", body[0], call)
        else:
            await self._line.send(
                new_method_return(call, *self._told(method, str(fields[HeaderFields.path]), body))
            )

    def _told(self, method: str, path: str, body: tuple[Any, ...]) -> tuple[str | None, tuple[Any, ...]]:
        if method == "ListUnitsByPatterns":
            rows = [
                (
                    unit,
                    "d",
                    "loaded",
                    said["ActiveState"][1],
                    said["SubState"][1],
                    "",
                    get_unit_path(unit),
                    0,
                    "",
                    "/",
                )
                for unit, said in self.units.items()
                if said["ActiveState"][1] in body[0] and unit.startswith(_prefix_in(body[1][0]))
            ]
            return "a(ssssssouso)", (rows,)
        if method == "Get":
            return "v", (("t", self.beats),)
        if method == "GetAll":
            said = next(
                (shown_unit for unit, shown_unit in self.units.items() if get_unit_path(unit) == path), None
            )
            return "a{sv}", (said or {"ActiveState": ("s", "inactive"), "Job": ("(uo)", (0, "/"))},)
        return None, ()


@asynccontextmanager
async def scripted_systemd(bus: str) -> AsyncGenerator[ScriptedSystemd, None]:
    """A manager that answers on `bus` until the end of the block."""
    async with await open_dbus_connection(f"unix:path={bus}") as line:
        owner = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
        await line.send(new_method_call(owner, "RequestName", "su", (SYSTEMD, 4)))
        while (await line.receive()).header.message_type is not MessageType.method_return:
            pass  # the signal that the name is ours
        manager = ScriptedSystemd(line)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.serve)
            yield manager
            nursery.cancel_scope.cancel()


def _prefix_in(pattern: str) -> str:
    """What a name must begin with to match: in a pattern a backslash is written twice."""
    return pattern.removesuffix("*.service").replace("\\\\", "\\")


def _as_sent(said: list[Any]) -> tuple[Any, ...]:
    """What D-Bus has pairs and groups for, JSON has lists for."""
    return tuple(
        {name: tuple(values) for name, values in part.items()} if isinstance(part, dict) else part
        for part in said
    )


_WITH_A_JOB = ("start", "refused", "not started", "stopped")
