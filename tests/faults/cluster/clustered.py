"""Clustered: a real cluster under one Controller, the load on it, and what must be true of every job afterwards."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from celery5 import App, AsyncResult, Event, gather
from tests.redis.commands.staff import Employee, Staff, wait_until

TARGET = [sys.executable, "-m", "celery5", "-A", "tests.faults.worker.bread:app"]
LIMIT = 90.0
"""Seconds that anything here may take: it is a busy machine."""


class Clustered:
    """One cluster: the Controllers that were started for it, and its members."""

    def __init__(self, staff: Staff, description: Path, **settings: Any) -> None:
        self.staff = staff
        self.description = description
        self.settings = settings
        self.controller = self.start()

    def start(self) -> Employee:
        """Start a Controller, without waiting for what it starts."""
        command = [*TARGET, "controller", "start", "--cluster", str(self.description)]
        self.controller = self.staff.launch(command, **self.settings)
        return self.controller

    @property
    def members(self) -> dict[str, int]:
        """The processes of the members that run now, by name, whoever has started them. What a member forks looks just
        like it for a moment."""
        found: dict[int, tuple[str, int]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):  # it has just ended, or is somebody else's
                words = (path / "cmdline").read_bytes().decode().split("\0")
                name = words[words.index("--name") + 1]
                ours = f"HISTORY={self.staff.history}".encode() in (path / "environ").read_bytes().split(
                    b"\0"
                )
                if ours and (path / "comm").read_text() != "celery5-sidecar\n" and _runs(path):
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    found[int(path.name)] = name, parent
        return {name: pid for pid, (name, parent) in found.items() if parent not in found}

    def said(self, message: str, name: str = "") -> list[dict[str, Any]]:
        """What the Controller has logged under `celery5:<message>`, about one member or about all."""
        return [line for line in self.controller.lines(message) if name in ("", line["name"])]

    def whole(self) -> None:
        """Wait until all members have been up once."""
        wait_until(lambda: bool(self.controller.lines("controller:started")), within=LIMIT)

    def back(self, name: str, pid: int) -> None:
        """Wait until another process than this one is there for a member, and is up."""
        wait_until(lambda: self.members.get(name, pid) != pid, within=LIMIT)
        wait_until(lambda: self.said("member:started", name) != [] and self.is_whole, within=LIMIT)

    @property
    def is_whole(self) -> bool:
        """Whether as many are up as were started."""
        ups, starts = (len(self.said(f"member:{what}")) for what in ("started", "start-requested"))
        return ups == starts

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a member a signal; gives its process id."""
        pid = self.members[name]
        os.kill(pid, number)
        return pid

    def stopped(self) -> int:
        """The Controller's exit code after SIGTERM."""
        self.controller.signal(signal.SIGTERM)
        code = self.controller.wait(2 * LIMIT)
        wait_until(lambda: not self.members, within=LIMIT)
        return code

    def tell(self, *words: str) -> Employee:
        """A `celery5 controller` command, once it has ended."""
        one = self.staff.launch([*TARGET, "controller", *words], **self.settings)
        one.wait(LIMIT)
        return one

    def ended(self) -> None:
        """End what is left of it, whatever the test has left it in."""
        for pid in self.members.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.controller.process.poll() is None:
            self.controller.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.controller.wait(30)
        for pid in self.members.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Load:
    """Jobs and events that come all the while, from a thread, until the block is left."""

    def __init__(self, staff: Staff, *, events: bool = True, **settings: Any) -> None:
        self._staff = staff
        self._settings = settings
        self._events = events
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send_on)
        self.sent: list[AsyncResult[int]] = []
        self.events = 0
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(2 * LIMIT)
        if self.error is not None:
            raise self.error

    def _send_on(self) -> None:
        app = App(self._staff.app.name, broker=self._staff.app.settings.broker, **self._settings)
        nap = app.task(name="nap")(self._staff.app.tasks["nap"].function)

        @app.event(name="bread.Baked")
        class Baked(Event):
            number: int

        try:
            while not self._over.wait(0.02):
                self.sent += app.send_many([nap.s(0.02), nap.s(0.0)])
                if self._events:
                    app.events.send([Baked(number=self.events)])
                    self.events += 1
            assert app.backlog.flush(LIMIT), (
                "what a sender had kept must go when there is somebody to take it"
            )
        except BaseException as error:
            self.error = error
        finally:
            app.close()

    def ended_well(self, *, victims: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Nothing is lost: each job has a result, each event has come. Nothing is doubled: a job ran again only where
        the process of each run but the last is one of the `victims`, killed with it in hand; its result is the last
        run's."""
        app = self._staff.app
        results: list[Any] = gather([app.result(job.id, queue="default") for job in self.sent], timeout=LIMIT)
        assert all(isinstance(result, int) for result in results), [
            e for e in results if not isinstance(e, int)
        ]
        runs = _runs_of(self._staff, "begin")
        assert set(runs) >= {job.id for job in self.sent}
        for handle, value in zip(self.sent, results, strict=True):
            *before, last = runs[handle.id]
            assert value == last
            assert victims.issuperset(before), (handle.id, before, last)
        wait_until(lambda: len(_runs_of(self._staff, "smelt")) >= self.events, within=LIMIT)
        smelt = _runs_of(self._staff, "smelt")
        assert len(smelt) == self.events
        assert all(victims.issuperset(before) for *before, _last in smelt.values())
        assert all(victims.issuperset(before) for *before, _last in _runs_of(self._staff, "tick").values())

    def longest_pause(self) -> float:
        """Seconds between two jobs that ended, at most, while jobs came."""
        ends = sorted(note.at for note in self._staff.notes("end"))
        return max(after - before for before, after in pairwise(ends))


def _runs_of(staff: Staff, what: str) -> dict[str, list[int]]:
    """The processes that ran each job, in the order of its runs."""
    found: dict[str, list[int]] = {}
    for note in staff.notes(what):
        found.setdefault(note.job, []).append(note.pid)
    return found


def _runs(process: Path) -> bool:
    """Whether it is no zombie, nor one that was forked by another of them."""
    return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
