"""Systemctl There: a `systemctl --user` and a `loginctl` for machines without systemd; units really are processes.

It knows what celery5 says to it and of units what celery5 writes, and complains of anything else. Each unit has a
process of its own, which starts it, hears what it says to NOTIFY_SOCKET and watches over it, as systemd does. It stands
by itself: it runs with no path but Python's own.
"""

import contextlib
import fnmatch
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

RUNTIME = Path(os.environ["XDG_RUNTIME_DIR"])
THERE = RUNTIME / "there"
UNITS = RUNTIME / "systemd" / "user"
GONE = {"ActiveState": "inactive", "Result": "success", "ExecMainCode": "0", "ExecMainStatus": "0"}
ESCAPED = {"n": "\n", "t": "\t"}


def look(unit: str) -> dict[str, str]:
    try:
        return dict(json.loads((THERE / f"{unit}.json").read_text()))
    except FileNotFoundError:
        return {"Id": unit, "InvocationID": "", "StatusText": "", "MainPID": "0", **GONE}


def note(unit: str, **changes: str) -> None:
    THERE.mkdir(parents=True, exist_ok=True)
    new = THERE / f"{unit}.{os.getpid()}.new"
    new.write_text(json.dumps({**look(unit), **changes}))
    new.replace(THERE / f"{unit}.json")


def filled(text: str) -> str:
    """A value of a unit with its specifiers replaced."""
    specifiers = {"%h": os.environ["HOME"], "%t": str(RUNTIME), "%%": "%"}
    return re.sub("%.", lambda match: specifiers[match[0]], text)


def words(line: str) -> list[str]:
    """A command line, by the rules of systemd.service(5)."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    unescaped = [
        re.sub(r"\\(.)", lambda match: ESCAPED.get(match[1], match[1]), a) if a else b for a, b in found
    ]
    return [filled(word).replace("$$", "$") for word in unescaped]


def variables(text: str) -> dict[str, str]:
    """An environment file, by the rules of systemd.exec(5)."""
    found = re.findall(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|([^\n]*))\n?', text, re.DOTALL)
    return {
        name: re.sub(r'\\(["\\`$])', r"\1", quoted, flags=re.DOTALL) if quoted else plain
        for name, quoted, plain in found
    }


def read(unit: str) -> tuple[dict[str, str], dict[str, str]]:
    """The settings of a unit, and its environment."""
    settings: dict[str, str] = {}
    environment: dict[str, str] = {}
    for line in (UNITS / unit).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings[name] = value
        if name == "EnvironmentFile":
            environment |= variables(Path(filled(value)).read_text())
    return settings, environment


def start(unit: str) -> int:
    if not (UNITS / unit).exists():
        sys.stderr.write(f"Failed to start {unit}: Unit {unit} not found.\n")
        return 5
    if look(unit)["ActiveState"] in ("active", "activating"):
        return 0
    if look(unit)["ActiveState"] != "deactivating":
        note(
            unit, **{**GONE, "ActiveState": "activating", "InvocationID": uuid.uuid4().hex, "StatusText": ""}
        )
    with (RUNTIME / "supervisor.err").open("a") as trouble:
        subprocess.Popen(
            [sys.executable, "-IS", __file__, "supervise", unit],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=trouble,
            start_new_session=True,
        )
    return 0


def supervise(unit: str) -> int:
    while look(unit)["ActiveState"] == "deactivating":
        time.sleep(0.02)
    invocation = look(unit)["InvocationID"] if look(unit)["ActiveState"] == "activating" else uuid.uuid4().hex
    settings, environment = read(unit)
    assert settings["Type"] == "notify"
    assert settings["Restart"] == "no"
    address = f"celery5-there-{uuid.uuid4().hex}"  # an abstract one: a path may be too long
    limit = float(settings["WatchdogSec"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(f"\0{address}")
        ear.settimeout(0.02)
        keep = {name: os.environ[name] for name in ("HOME", "PATH", "XDG_RUNTIME_DIR")}
        watched = {"WATCHDOG_USEC": str(int(limit * 1e6))} if limit else {}
        with (RUNTIME / f"{unit}.log").open("ab") as log:
            main = subprocess.Popen(
                words(settings["ExecStart"]),
                cwd=filled(settings["WorkingDirectory"]),
                env={
                    **keep,
                    **environment,
                    **watched,
                    "NOTIFY_SOCKET": f"@{address}",
                    "INVOCATION_ID": invocation,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        begun = {**GONE, "ActiveState": "activating", "InvocationID": invocation, "MainPID": str(main.pid)}
        note(unit, **begun, SupervisorPID=str(os.getpid()))
        end(unit, main, watch(unit, main, ear, limit, float(settings["TimeoutStopSec"])))
    return 0


def watch(
    unit: str, main: "subprocess.Popen[bytes]", ear: socket.socket, limit: float, patience: float
) -> str:
    """Until it has ended. Returns what systemd calls the result."""
    heard, asked, mark = time.monotonic(), None, THERE / f"{unit}.stop"
    result = ""
    while main.poll() is None:
        try:
            said = dict(line.partition("=")[::2] for line in ear.recv(65536).decode().splitlines())
        except TimeoutError:
            said = {}
        if said.get("WATCHDOG") == "1" or said.get("READY") == "1":
            heard = time.monotonic()
        if "STATUS" in said:
            note(unit, StatusText=said["STATUS"])
        if said.get("READY") == "1" and asked is None:
            note(unit, ActiveState="active")
        if said.get("STOPPING") == "1":
            note(unit, ActiveState="deactivating")
        if mark.exists() and asked is None:
            mark.unlink()
            asked = time.monotonic()
            note(unit, ActiveState="deactivating")
            main.terminate()
        if asked is not None and time.monotonic() > asked + patience:
            result = "timeout"
            main.kill()
        if limit and time.monotonic() > heard + limit and look(unit)["ActiveState"] == "active":
            result = "watchdog"
            main.kill()
    with contextlib.suppress(TimeoutError):  # what it said just before its end
        said = dict(line.partition("=")[::2] for line in ear.recv(65536).decode().splitlines())
        note(unit, StatusText=said.get("STATUS", look(unit)["StatusText"]))
    return result


def end(unit: str, main: "subprocess.Popen[bytes]", result: str) -> None:
    code = main.wait()
    own = "success" if code in (0, -signal.SIGTERM) else "exit-code" if code > 0 else "signal"
    result = result or own
    note(
        unit,
        ActiveState="inactive" if result == "success" else "failed",
        Result=result,
        ExecMainCode="1" if code >= 0 else "2",
        ExecMainStatus=str(abs(code)),
        MainPID="0",
    )


def show(properties: str, which: str, *, value: bool) -> int:
    found = [look(path.name.removesuffix(".json")) for path in sorted(THERE.glob("*.json"))]
    if value:
        sys.stdout.write(f"{look(which).get(properties, '')}\n")
    else:
        blocks = [unit for unit in found if fnmatch.fnmatch(unit["Id"], which)]
        names = properties.split(",")
        sys.stdout.write("\n".join("".join(f"{name}={unit[name]}\n" for name in names) for unit in blocks))
    return 0


def tell(unit: str, number: str) -> int:
    pid = int(look(unit)["MainPID"])
    if not pid:
        sys.stderr.write("Failed to kill unit: No main process to kill\n")
        return 1
    os.kill(pid, signal.Signals[number])
    return 0


def systemctl(*said: str) -> int:
    if (RUNTIME / "broken").exists():
        sys.stderr.write("Failed to connect to bus: No medium found\n")
        return 1
    time.sleep(float((RUNTIME / "slow").read_text()) if (RUNTIME / "slow").exists() else 0)
    match said:
        case ("--user", "show", "--value", properties, unit):
            return show(properties.removeprefix("--property="), unit, value=True)
        case ("--user", "show", properties, pattern):
            return show(properties.removeprefix("--property="), pattern, value=False)
        case ("--user", "daemon-reload"):
            return 0
        case ("--user", "reset-failed", unit):
            return 0 if look(unit)["ActiveState"] == "failed" else 1
        case ("--user", "start", "--no-block", unit):
            return start(unit)
        case ("--user", "stop", "--no-block", unit):
            (THERE / f"{unit}.stop").touch()
            return 0
        case ("--user", "kill", "--kill-who=main", number, unit):
            return tell(unit, number.removeprefix("--signal="))
        case _:
            sys.stderr.write(f"systemctl does not know {shlex.join(said)}\n")
            return 2


def main(called: str, *said: str) -> int:
    if called == "supervise":
        return supervise(said[0])
    if called == "loginctl":
        sys.stdout.write("no\n" if (RUNTIME / "no-linger").exists() else "yes\n")
        return 0
    return systemctl(*said)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
