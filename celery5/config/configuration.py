"""Load settings from a module, a TOML file, a hash in Redis or a backend of the user's, and watch for changes.

A backend loads a mapping of settings, and can wait until something may have changed. Loading blocks, so it is done in
a thread where there is an event loop.
"""

import importlib.util
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, cast, runtime_checkable

from celery5.broker.calls import jobs
from celery5.broker.drivers.opening import open_blocking
from celery5.broker.endpoint import Endpoint
from celery5.config.import_path import add_current_folder, describe_import_path
from celery5.config.key_folder import get_key_folder
from celery5.config.scaling import get_autoscale, get_prioritisation
from celery5.config.settings import LoadedConfiguration, Settings, find_hash_fault, find_warnings
from celery5.errors import BadBrokerURL, BrokerError, BrokerReplied, CeleryError, Misconfigured
from celery5.protocol.brokers import find_unused_routes
from celery5.protocol.masking import describe_error
from celery5.runners.context import LOG_EVENT

FILE_POLL_INTERVAL = 1.0
"""Seconds between two checks of a file."""
REDIS_POLL_INTERVAL = 10.0
"""Seconds between two reads of a hash in Redis: an idle worker may send one command a second at most, in all."""
MAX_DESCRIBED = 10
"""Fields that are named of those that were skipped."""
MAX_REPORTS = 50
"""The most faults of one reading of a hash that are written."""
_HINT = "correct the field, or remove it by HDEL"


@runtime_checkable
class Configuration(Protocol):
    """A configuration backend. Errors name it by `where`."""

    @property
    def where(self) -> str: ...

    def load(self) -> Mapping[str, Any]:
        """Return the settings by name. May block. Raises Misconfigured."""
        ...

    async def watch(self) -> None:
        """Return when something may have changed since the last `load`. Called repeatedly, under Trio."""
        ...


class ModuleConfiguration:
    """A Python module whose names are settings: `concurrency = 20`. The default backend.

    Each load runs the file in a new module object: nothing of the old one remains, and what others have imported stays
    as it is.
    """

    def __init__(self, module: str) -> None:
        self.where: str = f"module {module}"
        self._module = module
        self._last_state: object = None

    def load(self) -> Mapping[str, Any]:
        """Return the names of the module, except private names, imports, functions and classes."""
        path = self._find_file()
        self._last_state = _get_file_state(path)
        module = ModuleType(self._module)
        module.__file__ = str(path)
        try:
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:
            raise Misconfigured(f"{self.where} fails: {type(error).__name__}: {error}") from error
        return {name: value for name, value in vars(module).items() if _is_setting(name, value)}

    async def watch(self) -> None:
        """Wait until the file has changed."""
        await _wait_for_change(
            lambda: _get_file_state(self._find_file()), lambda: self._last_state, FILE_POLL_INTERVAL
        )

    def _find_file(self) -> Path:
        folder = add_current_folder()
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(self._module)
        except (ImportError, ValueError) as error:
            raise Misconfigured(f"no configuration {self.where}: {error}") from None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise Misconfigured(f"no configuration {self.where}: {describe_import_path(folder)}")
        return Path(spec.origin)


class TomlConfiguration:
    """A TOML file; in a `pyproject.toml`, the table `[tool.celery5]`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.where: str = f"file {self._path}"
        self._last_state: object = None

    def load(self) -> Mapping[str, Any]:
        """Return the table of the file."""
        import tomllib  # most applications have no such file

        self._last_state = _get_file_state(self._path)
        try:
            table: dict[str, Any] = tomllib.loads(self._path.read_text("utf-8-sig"))
        except (OSError, ValueError) as error:
            raise Misconfigured(f"{self.where}: {error}") from None
        if self._path.name != "pyproject.toml":
            return table
        settings = table.get("tool", {}).get("celery5", {})
        if not isinstance(settings, dict):
            raise Misconfigured(f"{self.where}: [tool.celery5] is no table")
        return cast("dict[str, Any]", settings)

    async def watch(self) -> None:
        """Wait until the file has changed."""
        await _wait_for_change(
            lambda: _get_file_state(self._path), lambda: self._last_state, FILE_POLL_INTERVAL
        )


FilterFields = Callable[[Mapping[str, str], Mapping[str, str]], tuple[dict[str, str], list[str]]]
"""Takes all fields of a hash, and those that were used before. Returns those that can be used, and the faults of the
others."""


def _keep_allowed(fields: Mapping[str, str], _last: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the fields that a hash may set, and the faults of the others, where no application can say more."""
    faults = {name: find_hash_fault(name, raw) for name, raw in fields.items()}
    return {name: raw for name, raw in fields.items() if not faults[name]}, [*filter(None, faults.values())]


class RedisConfiguration:
    """A hash in the broker's Redis that all workers of an application share.

    Set a field by `HSET celery5:{shop}:settings concurrency 20`. The hash can set only what `celery5.config.settings`
    marks for it: no address, no file, no name of code, and numbers up to a bound. A field that cannot be used is
    skipped with a warning, once for each fault.
    """

    def __init__(self, endpoint: Endpoint, key: str, filter_fields: FilterFields) -> None:
        self.where: str = f"hash {key}"
        self._endpoint = endpoint
        self._key = key
        self._filter_fields = filter_fields
        self._last_state: object = None
        self._usable: dict[str, str] = {}
        # What is wrong with fields that were skipped the last time.
        self.faults: Sequence[str] = ()
        self._reported: set[str] = set()

    def load(self) -> Mapping[str, Any]:
        """Return the fields of the hash that can be used, as text."""
        try:
            self._last_state = fields = self._read()
        except BrokerReplied as error:
            if error.code != "WRONGTYPE":
                raise
            self._report([f"it cannot be read: {error}"])
            return self._usable
        self._usable, faults = self._filter_fields(fields, self._usable)
        self._report(faults)
        return self._usable

    def _report(self, faults: Sequence[str]) -> None:
        self.faults = faults
        for fault in [text for text in faults if text not in self._reported][:MAX_REPORTS]:
            self._reported.add(fault)
            LOG_EVENT.get()("configuration:field-skipped", "warning", where=self.where, why=fault, hint=_HINT)
        self._reported.intersection_update(faults)  # what was corrected, and is wrong again, is news

    async def watch(self) -> None:
        """Wait until the hash has changed. An unreachable broker counts as no change."""
        await _wait_for_change(self._read_or_last, lambda: self._last_state, REDIS_POLL_INTERVAL)

    def _read_or_last(self) -> object:
        try:
            return self._read()
        except BrokerError:
            return self._last_state

    def _read(self) -> dict[str, str]:
        redis = open_blocking(self._endpoint, max_connections=1)
        try:
            return redis.perform(jobs.read_hash(self._key))
        finally:
            redis.close()


def describe_skipped_fields(configuration: "Configuration | None") -> list[str]:
    """Return a line for each field of a configuration in Redis that was skipped when it was read, ten at most."""
    if not isinstance(configuration, RedisConfiguration):
        return []
    return [f"{configuration.where}: {fault}: skipped" for fault in configuration.faults[:MAX_DESCRIBED]]


def list_warnings(
    settings: Settings,
    configuration: "Configuration | None",
    tasks: Collection[str],
    environ: Mapping[str, str],
) -> list[str]:
    """Return a line for each setting of an application that is allowed, but probably a mistake.

    Args:
        settings: Those that it uses.
        configuration: Where it has them from, besides the environment and its code.
        tasks: The names of its tasks. If there are any, a route that matches none of them is a mistake.
        environ: The environment of the process.
    """
    unused = find_unused_routes(tasks, settings.queue_routes) if tasks else []
    return [
        *find_warnings(settings, environ),
        *describe_skipped_fields(configuration),
        *(f"queue_routes: {pattern!r} matches no task of the application" for pattern in unused),
    ]


def make_configuration(
    source: "str | Configuration",
    *,
    broker: Callable[[], str],
    key: str,
    filter_fields: "FilterFields | None" = None,
) -> Configuration:
    """Return the backend for `source`.

    `source` is `redis`, the path of a `.toml` file, the name of a module, or a backend of the user's. `filter_fields`
    decides which fields of a hash are used. Raises Misconfigured.
    """
    if not isinstance(source, str):
        if not isinstance(cast("object", source), Configuration):
            raise Misconfigured(
                f"config is {source!r}: give a module's name, the path of a .toml file, 'redis', or an object with "
                "where, load() and watch()"
            )
        return source
    if source == "redis":
        return RedisConfiguration(Endpoint.from_url(broker()), key, filter_fields or _keep_allowed)
    if source.endswith(".toml"):
        return TomlConfiguration(source)
    if source.endswith(".py") or not all(part.isidentifier() for part in source.split(".")):
        raise Misconfigured(
            f"config is {source!r}: give a module's name (shop.settings), a .toml file, or 'redis'"
        )
    return ModuleConfiguration(source)


def load_values(configuration: Configuration) -> LoadedConfiguration:
    """Return the current content of a configuration. May block.

    Raises:
        Misconfigured: The code of a backend of the user's failed, or returned something else than settings by name.
        BrokerError: Redis, where the configuration is, cannot be reached.
    """
    where = str(configuration.where)
    try:
        values = cast("object", configuration.load())
        # A mapping of the user's own may fail when it is read, too.
        items = dict(cast("Mapping[object, Any]", values)) if isinstance(values, Mapping) else None
    except CeleryError:
        raise
    except (Exception, SystemExit) as error:
        raise Misconfigured(f"{where} fails: {describe_error(error)}") from error
    if items is None:
        kind = type(cast("object", values)).__name__
        raise Misconfigured(f"{where}: load() returned {kind}: return a mapping of settings by name")
    for name in items:
        if not isinstance(name, str):
            raise Misconfigured(f"{where}: load() returned the name {name!r}: names of settings are texts")
    return LoadedConfiguration(where, cast("dict[str, Any]", items))


def check_usable(settings: Settings, app: str, broker: str) -> Settings:
    """Return the settings if they can be used. May block. Raises Misconfigured.

    This finds faults that would otherwise show only after the old settings were replaced. `broker` is the URL in use:
    a different one in the settings must accept a connection.
    """
    get_key_folder(app, settings.keys, os.environ)
    get_autoscale(settings)
    get_prioritisation(settings)
    try:
        endpoint = Endpoint.from_url(settings.broker)
        endpoint.ssl_context()
        if settings.broker != broker:
            redis = open_blocking(endpoint, max_connections=1)
            try:
                redis.perform(jobs.PING)
            finally:
                redis.close()
    except (BadBrokerURL, BrokerError) as error:
        raise Misconfigured(str(error)) from None
    return settings


def _is_setting(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType | FunctionType | type)


def _get_file_state(path: Path) -> object:
    """Return a value that changes when the file changes or is replaced; None while there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def _wait_for_change(
    read: Callable[[], object], get_last: Callable[[], object], interval: float
) -> None:
    """Poll until `read` returns something else than `get_last`.

    None counts as no change: a file that is missing is just being replaced.
    """
    import trio  # imported by workers only: producers do not watch

    while True:
        await trio.sleep(interval)
        state = await trio.to_thread.run_sync(partial(_read_safely, read))  # a stop waits for the thread
        if state is not None and state != get_last():
            return


def _read_safely(read: Callable[[], object]) -> object:
    try:
        return read()
    except Misconfigured:
        return None
