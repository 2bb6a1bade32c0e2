"""End a worker's incarnation when its configuration has changed, so that the next one has the new settings.

The new configuration is read and checked first: an invalid one changes nothing, and the log says why. Then the
incarnation stops in order: it reads no more jobs, lets running ones finish within the grace period, and settles. Only
then are the new settings applied, and the next incarnation starts with them in the same process.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from celery5.errors import CommandRefused, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import NoParameters
from celery5.protocol.masking import describe_error
from celery5.runners.user_errors import reraise_cancellation

WATCH_INTERVAL = 1.0
"""Seconds between the end of a watch and the next one, which may fail or return at once."""
LOAD_TIMEOUT = 30.0
"""Seconds that loading a configuration may take."""


class ConfigurationChanged(Exception):
    """The configuration has changed: this incarnation ends, and the next one begins."""


class NextIncarnation(msgspec.Struct):
    """Whether another incarnation follows this one in the same process."""

    # Changes the settings between the two; None while no other one follows.
    _apply: Callable[[], None] | None = None

    @property
    def is_due(self) -> bool:
        """Whether another one follows."""
        return self._apply is not None

    def request(self, apply: Callable[[], None]) -> None:
        """Request another incarnation; `apply` changes the settings before it starts."""
        self._apply = apply

    def apply_settings(self) -> None:
        """Apply the new settings, if there are any: the next incarnation starts."""
        apply, self._apply = self._apply, None
        if apply is not None:
            apply()


class ReloadSignal:
    """Wakes the waiting tasks when a signal requests that the configuration is read again."""

    def __init__(self) -> None:
        self._sent = trio.Event()

    def send(self) -> None:
        """Wake them. To be called in the loop."""
        self._sent.set()
        self._sent = trio.Event()

    async def wait(self) -> None:
        """Wait for the next signal."""
        await self._sent.wait()


class WatchedConfiguration(Protocol):
    """A configuration backend, as this service needs it."""

    @property
    def where(self) -> str: ...

    async def watch(self) -> None: ...


class ReloadableApp(Protocol):
    """An application, as this service needs it."""

    def reload_configuration(self) -> tuple[tuple[str, ...], Callable[[], None]]:
        """Read and check the configuration, which may block. Raises Misconfigured.

        Returns the names of the settings that change, and a function that changes them.
        """
        ...


class Reloader:
    """Watches the configuration of one application, if there is one and `reload` is true."""

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
        self._signal = reload_signal
        self._ready = trio.Event()
        self._logged_reason = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled. Raises ConfigurationChanged when there are new settings."""
        self._ready = trio.Event()
        async with trio.open_nursery() as nursery:
            if self._configuration is not None and self._allowed:
                nursery.start_soon(self._watch, self._configuration)
            if self._signal is not None:
                nursery.start_soon(self._reload_on_signal, self._signal)
            task_status.started()
            await self._ready.wait()
            nursery.cancel_scope.cancel()
        raise ConfigurationChanged

    async def handle_command(self, _parameters: NoParameters) -> dict[str, list[str]]:
        """Perform the command `reload`: read the configuration now. Returns the names of the settings that change."""
        if self._configuration is None:
            raise CommandRefused(
                "this application has no configuration to reload: App(config=...), or CELERY5_CONFIG"
            )
        if not self._allowed:
            raise CommandRefused("this worker was started with --no-reload")
        try:
            changed = await self._read(self._configuration)
        except Misconfigured as error:
            raise CommandRefused(f"the old settings stay: {error}") from None
        return {"changed": changed}

    async def _reload_on_signal(self, signal: ReloadSignal) -> None:
        while True:
            await signal.wait()
            try:
                reply = await self.handle_command(NoParameters())
            except CommandRefused as error:
                self._log.event("configuration:reload-refused", "error", why=str(error))
            except BaseException as error:  # a backend of the user's own may raise anything
                reraise_cancellation(error)
                if self._configuration is not None:
                    self._logged_reason = ""
                    self._log_rejection(self._configuration, error)
            else:
                if not reply["changed"]:
                    self._log.event("configuration:unchanged")

    async def _watch(self, configuration: WatchedConfiguration) -> None:
        while not self._ready.is_set():
            try:
                await configuration.watch()
                await self._read(configuration)
                self._logged_reason = ""
            except BaseException as error:  # a backend of the user's own may raise anything
                reraise_cancellation(error)
                self._log_rejection(configuration, error)
            await trio.sleep(WATCH_INTERVAL)

    async def _read(self, configuration: WatchedConfiguration) -> list[str]:
        try:
            with trio.fail_after(LOAD_TIMEOUT):
                changed, apply = await trio.to_thread.run_sync(
                    self._app.reload_configuration, abandon_on_cancel=True
                )
        except trio.TooSlowError:
            raise Misconfigured(f"{configuration.where} could not be read in {LOAD_TIMEOUT:g} s") from None
        if changed:
            self._next.request(apply)
            where, settings = configuration.where, sorted(changed)
            self._log.event("configuration:changed", "info", where=where, settings=settings)
            self._ready.set()
        return sorted(changed)

    def _log_rejection(self, configuration: WatchedConfiguration, error: BaseException) -> None:
        """Log an invalid configuration, once for each reason."""
        text = str(error) if isinstance(error, Misconfigured) else describe_error(error)
        if text != self._logged_reason:
            self._logged_reason = text
            hint = "the old one stays"
            self._log.event("configuration:rejected", "error", where=configuration.where, why=text, hint=hint)
