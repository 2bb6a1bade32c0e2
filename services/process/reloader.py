"""Reloader: ends a worker's incarnation when its configuration has changed, so that the next one has the new settings.

What is new is read and checked first: a bad configuration changes nothing, and the log says why. Then the incarnation
is taken down in order: it stops consuming, lets what runs finish within the grace period, and settles. Only then are
the new settings applied, and the next one, with its services and boot steps, begins with them, in the same process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from celery5.errors import CommandRefused, Misconfigured
from celery5.logs.log import Log

WATCH_INTERVAL = 1.0
"""Seconds between the end of a watch and the next: a backend whose watch fails, or returns at once, is not spun on."""
LOAD_TIMEOUT = 30.0
"""Seconds that loading a configuration may take."""


class ConfigurationChanged(Exception):
    """The configuration has changed: this incarnation ends, and the next one begins."""


@dataclass(slots=True)
class NextIncarnation:
    """Whether another incarnation is to follow this one, so that the process is not stopping, and what is to be done
    between the two: `apply`."""

    apply: Callable[[], None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether there is to be one."""
        return self.apply is not None

    def apply_settings(self) -> None:
        """It begins: there are new settings, if they are to change."""
        apply, self.apply = self.apply, None
        if apply is not None:
            apply()


class ReloadSignal:
    """Rings when a signal asks for the configuration to be read, for all who listen by then."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def send(self) -> None:
        """Ring it; on the loop."""
        self._rung.set()
        self._rung = trio.Event()

    async def wait(self) -> None:
        """Wait for it."""
        await self._rung.wait()


class WatchedConfiguration(Protocol):
    """A configuration backend, as this service needs it."""

    @property
    def where(self) -> str: ...

    async def watch(self) -> None: ...


class ReloadableApp(Protocol):
    """What has settings: the application."""

    def reload_configuration(self) -> tuple[tuple[str, ...], Callable[[], None]]:
        """Read and check the configuration, which may block. Raises Misconfigured. Gives the names of the settings that
        change, and what changes them."""
        ...


class Reloader:
    """Watches the configuration of one application. Without one, or when it may not `reload`, it does nothing."""

    def __init__(
        self,
        *,
        app: ReloadableApp,
        configuration: WatchedConfiguration | None,
        reload: bool,
        next_incarnation: NextIncarnation,
        log: Log,
        reload_signal: ReloadSignal | None = None,
    ) -> None:
        self._app = app
        self._configuration = configuration
        self._allowed = reload
        self._next = next_incarnation
        self._log = log
        self._bell = reload_signal
        self._ready = trio.Event()
        self._complaint = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Raises Reload when there are new settings."""
        self._ready = trio.Event()
        async with trio.open_nursery() as nursery:
            if self._configuration is not None and self._allowed:
                nursery.start_soon(self._watch, self._configuration)
            if self._bell is not None:
                nursery.start_soon(self._listen, self._bell)
            task_status.started()
            await self._ready.wait()
            nursery.cancel_scope.cancel()
        raise ConfigurationChanged

    async def handle_command(self, _parameters: Mapping[str, Any]) -> dict[str, list[str]]:
        """The command `reload`: read the configuration now. Gives the names of the settings that change."""
        if self._configuration is None:
            raise CommandRefused(
                "this application has no configuration to reload: App(config=...), or CELERY5_CONFIG"
            )
        if not self._allowed:
            raise CommandRefused("this worker was started with --no-reload")
        try:
            changed = await self._look(self._configuration)
        except Misconfigured as error:
            raise CommandRefused(f"the old settings stay: {error}") from None
        return {"changed": changed}

    async def _listen(self, bell: ReloadSignal) -> None:
        while True:
            await bell.wait()
            try:
                told = await self.handle_command({})
            except CommandRefused as error:
                self._log.event("configuration:reload-refused", "error", why=str(error))
            except Exception as error:  # a backend of the user's own may raise anything
                if self._configuration is not None:
                    self._complaint = ""
                    self._complain(self._configuration, error)
            else:
                if not told["changed"]:
                    self._log.event("configuration:unchanged")

    async def _watch(self, configuration: WatchedConfiguration) -> None:
        while not self._ready.is_set():
            try:
                await configuration.watch()
                await self._look(configuration)
                self._complaint = ""
            except Exception as error:  # a backend of the user's own may raise anything
                self._complain(configuration, error)
            await trio.sleep(WATCH_INTERVAL)

    async def _look(self, configuration: WatchedConfiguration) -> list[str]:
        try:
            with trio.fail_after(LOAD_TIMEOUT):
                changed, apply = await trio.to_thread.run_sync(
                    self._app.reload_configuration, abandon_on_cancel=True
                )
        except trio.TooSlowError:
            raise Misconfigured(f"{configuration.where} could not be read in {LOAD_TIMEOUT:g} s") from None
        if changed:
            self._next.apply = apply
            self._log.event(
                "configuration:changed", "info", where=configuration.where, settings=sorted(changed)
            )
            self._ready.set()
        return sorted(changed)

    def _complain(self, configuration: WatchedConfiguration, error: Exception) -> None:
        """Once for each thing that is wrong."""
        text = str(error) if isinstance(error, Misconfigured) else f"{type(error).__name__}: {error}"
        if text != self._complaint:
            self._complaint = text
            self._log.event(
                "configuration:rejected",
                "error",
                where=configuration.where,
                why=text,
                hint="the old one stays",
            )
