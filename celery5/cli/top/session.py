"""Run the screen: one thread reads, one performs actions, and the main thread draws and waits for keys."""

import queue
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial

from rich.console import Console

from celery5.cli.top.readings import Reading
from celery5.cli.top.screen import draw, look, render
from celery5.cli.top.sources import TopSources
from celery5.cli.top.state import (
    CountDead,
    PauseQueue,
    Quit,
    ReadNow,
    ReplayDead,
    ScreenState,
    TopAction,
    ask_to_replay,
    describe_action,
    handle_key,
    show_notice,
)
from celery5.cli.top.tables import View
from celery5.cli.top.terminal import KeyTerminal
from celery5.errors import CeleryError
from celery5.protocol.masking import describe_error, get_error_text

TICK = 1.0
"""Seconds after which the screen is drawn again though nothing has happened: ages grow."""
MAX_ACTIONS = 10
"""Actions that wait to be performed."""

Change = Callable[[ScreenState], ScreenState]


class ReadingLoop:
    """Reads what the screen shows, again and again, in its own thread.

    Args:
        sources: What it reads from.
        interval: Seconds between two readings.
        on_reading: Called in that thread after each reading.
    """

    def __init__(self, sources: TopSources, interval: float, on_reading: Callable[[], None]) -> None:
        self._sources = sources
        self._interval = interval
        self._on_reading = on_reading
        self._poked = threading.Event()
        self._wanted: tuple[View, str] = (View.QUEUES, "")
        self._reading = Reading()
        self._read_at = time.monotonic()

    def want(self, view: View, details: str) -> None:
        """Set what the next reading is about."""
        self._wanted = (view, details)

    def poke(self) -> None:
        """Read at once."""
        self._poked.set()

    def get(self) -> tuple[Reading, float]:
        """Return the last reading, and the seconds since it was made."""
        return self._reading, time.monotonic() - self._read_at

    def run(self) -> None:
        """Read until the process ends."""
        while True:
            self._poked.clear()
            wanted = self._wanted
            try:
                self._reading = self._sources.read(*wanted)
                self._read_at = time.monotonic()
            except CeleryError as error:
                # What was read before stays on the screen, with its age.
                self._reading = replace(self._reading, error=get_error_text(error))
            except Exception as error:  # a defect: it must not end the screen in silence
                self._reading = replace(self._reading, error=f"unexpected: {describe_error(error)}")
            self._on_reading()
            self._poked.wait(0 if self._wanted != wanted else self._interval)


class TopSession:
    """The screen of one command, until a person ends it."""

    def __init__(self, sources: TopSources, *, interval: float) -> None:
        self._sources = sources
        self._interval = interval
        self._state = ScreenState()
        self._actions: queue.Queue[TopAction] = queue.Queue(MAX_ACTIONS)
        self._changes: queue.SimpleQueue[Change] = queue.SimpleQueue()

    def run(self) -> None:
        """Show the screen until a person ends it."""
        console = Console(highlight=False)
        with KeyTerminal() as terminal:
            reading_loop = ReadingLoop(self._sources, self._interval, terminal.wake)
            # Daemons: a person who quits does not wait for a reading. The audit trail learns from the context who acts.
            for target in (reading_loop.run, partial(self._perform_actions, reading_loop, terminal.wake)):
                run = partial(copy_context().run, target)
                threading.Thread(target=run, daemon=True, name="celery5 top").start()
            while True:
                self._apply_changes()
                reading, age = reading_loop.get()
                width, height = terminal.get_size()
                console.size = (width, height)
                lines = draw(self._state, reading, age=age, width=width, height=height)
                terminal.write(render(lines, console))
                for key in terminal.wait(TICK):
                    if key == "ctrl-z":
                        terminal.suspend()
                    elif self._press(key, reading_loop):
                        return

    def _apply_changes(self) -> None:
        while not self._changes.empty():
            self._state = self._changes.get()(self._state)

    def _press(self, key: str, reading_loop: ReadingLoop) -> bool:
        """Handle a key. Return whether the command ends."""
        reading, _ = reading_loop.get()
        self._state, action = handle_key(self._state, key, look(self._state, reading))
        reading_loop.want(self._state.view, self._state.details)
        match action:
            case None:
                return False
            case Quit():
                return True
            case ReadNow():
                reading_loop.poke()
            case PauseQueue() | CountDead() | ReplayDead():
                try:
                    self._actions.put_nowait(action)
                    self._state = show_notice(self._state, describe_action(action))
                except queue.Full:
                    self._state = show_notice(
                        self._state, "wait until the last actions are done", is_bad=True
                    )
        return False

    def _perform_actions(self, reading_loop: ReadingLoop, on_change: Callable[[], None]) -> None:
        """Perform actions until the process ends."""
        while True:
            action = self._actions.get()
            try:
                change = self._perform(action)
            except CeleryError as error:
                change = partial(show_notice, text=get_error_text(error), is_bad=True)
            except Exception as error:  # a defect: it must not end the screen in silence
                change = partial(show_notice, text=f"unexpected: {describe_error(error)}", is_bad=True)
            self._changes.put(change)
            reading_loop.poke()
            on_change()

    def _perform(self, action: TopAction) -> Change:
        match action:
            case PauseQueue(name, resume):
                return partial(show_notice, text=self._sources.set_paused(name, paused=not resume))
            case CountDead(group):
                return partial(ask_to_replay, group=group, count=self._sources.count_dead(group))
            case ReplayDead(group):
                return partial(show_notice, text=self._sources.replay_dead(group))
            case Quit() | ReadNow():
                return lambda state: state
