"""Run actions on many jobs in threads of this process: they go on when nobody looks, and can be stopped."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import msgspec

from celery5.app import App
from celery5.application import Application
from celery5.audit.actor import get_actor_name
from celery5.audit.recording import AuditedAction
from celery5.broker.colour import run_in_event_loop, run_in_plain_python
from celery5.broker.driver import AsyncDriver
from celery5.dead_letters.queues import DeadLetterTally
from celery5.errors import CeleryError

MAX_RUNNING = 4
"""Actions of an application that run at the same time."""
MAX_KEPT = 50
"""Actions that are remembered."""

BulkState = Literal["running", "stopping", "done", "stopped", "failed"]
RunBulk = Callable[..., DeadLetterTally]
"""Performs an action; takes `progress`, which is called with the tally after each batch."""


class BulkActionStopped(BaseException):
    """Somebody has stopped the action. Not an Exception: nothing on its way may take it for a failure."""


class TooManyBulkActions(CeleryError):
    """As many actions run as may."""


class BulkAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action on many jobs, as it stands."""

    id: str
    # A noun and a verb of the command line: `dlq:replay`.
    action: str
    # What it is done to, in words.
    target: str
    who: str
    state: BulkState
    # Seconds since 1970; `ended` is 0 while it runs.
    started: float
    ended: float = 0.0
    # Jobs that were counted before it began; None when there were too many to count.
    total: int | None = None
    # Jobs that it has looked at, and that it has changed.
    matched: int = 0
    done: int = 0
    # Jobs that it has left alone, by reason.
    left: Mapping[str, int] = {}
    # Who has stopped it, or why it has failed.
    why: str = ""

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("running", "stopping")

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self.ended or time.time()) - self.started


class BulkActions:
    """The actions of one application in this process.

    A thread performs each: it needs no event loop, so that the dashboard can be mounted in any application.
    """

    REACHED_AS: ClassVar[str] = "get_bulk_actions(app)."

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._actions: OrderedDict[str, BulkAction] = OrderedDict()

    def start(self, action: str, target: str, total: int | None, run: RunBulk) -> BulkAction:
        """Start an action, and return it. `run` performs it, in plain Python.

        Raises:
            TooManyBulkActions: As many run as may.
        """
        begun = BulkAction(
            id=secrets.token_hex(4),
            action=action,
            target=target,
            who=get_actor_name(),
            state="running",
            started=time.time(),
            total=total,
        )
        with self._lock:
            running = [one for one in self._actions.values() if one.is_running]
            if len(running) >= MAX_RUNNING:
                raise TooManyBulkActions(f"{len(running)} bulk actions run: stop one of them, or wait")
            self._actions[begun.id] = begun
            ended = [one.id for one in self._actions.values() if not one.is_running]
            for old in ended[: max(0, len(self._actions) - MAX_KEPT)]:
                del self._actions[old]
        # A daemon: each job is changed atomically, so the process may end meanwhile.
        threading.Thread(target=self._run, args=(begun, run), name=f"bulk-{begun.id}", daemon=True).start()
        return begun

    def list(self) -> list[BulkAction]:
        """Return the actions, the last one first."""
        with self._lock:
            return list(reversed(self._actions.values()))

    def get(self, action_id: str) -> BulkAction | None:
        """Return an action; None when there is none."""
        with self._lock:
            return self._actions.get(action_id)

    def stop(self, action_id: str) -> bool:
        """Stop an action after the jobs that it is about to change. Return whether it runs. For plain Python."""
        return run_in_plain_python(_stop, self._app, self, action_id)

    async def astop(self, action_id: str) -> bool:
        """`stop`, from Trio or asyncio."""
        return await run_in_event_loop(_stop, self._app, self, action_id)

    def mark_stopping(self, action_id: str, by: str) -> bool:
        """Have the thread of an action end it. Return whether it runs."""
        with self._lock:
            action = self._actions.get(action_id)
            if action is None or not action.is_running:
                return False
            stopping = msgspec.structs.replace(action, state="stopping", why=f"stopped by {by}")
            self._actions[action_id] = stopping
            return True

    def _run(self, begun: BulkAction, run: RunBulk) -> None:
        def progress(tally: DeadLetterTally) -> None:
            if self._note(begun.id, tally) == "stopping":
                raise BulkActionStopped

        try:
            with self._app.audit.acting_as(begun.who, source="dashboard"):
                self._note(begun.id, run(progress=progress))
        except BulkActionStopped:
            self._end(begun.id, "stopped")
        except Exception as error:
            self._end(begun.id, "failed", str(error))
        else:
            self._end(begun.id, "done")

    def _note(self, action_id: str, tally: DeadLetterTally) -> BulkState:
        with self._lock:
            action = msgspec.structs.replace(
                self._actions[action_id], matched=tally.matched, done=tally.done, left=dict(tally.left)
            )
            self._actions[action_id] = action
            return action.state

    def _end(self, action_id: str, state: BulkState, why: str = "") -> None:
        with self._lock:
            action = self._actions[action_id]
            self._actions[action_id] = msgspec.structs.replace(
                action, state=state, ended=time.time(), why=why or (action.why if state == "stopped" else "")
            )


async def _stop(app: Application, redis: AsyncDriver, actions: BulkActions, action_id: str) -> bool:
    async with AuditedAction(app, redis, "bulk:stop", action_id) as audited:
        done = actions.mark_stopping(action_id, get_actor_name())
        audited.set_count(int(done))
        return done


_BY_APP: WeakKeyDictionary[App, BulkActions] = WeakKeyDictionary()


def get_bulk_actions(app: App) -> BulkActions:
    """Return the actions of an application in this process."""
    return _BY_APP.setdefault(app, BulkActions(app))
