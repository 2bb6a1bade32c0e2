"""Configuration: where settings come from besides code, flags and the environment, and how a change is noticed.

A backend is whatever loads a mapping of settings and can wait until something may have changed. Loading blocks, so it
is done in a thread where there is a loop.
"""

import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, cast, runtime_checkable

from celery5.broker.calls import jobs
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.commands.keyring import get_key_folder
from celery5.config.settings import Settings, find_hash_fault
from celery5.errors import BadBrokerURL, BrokerError, Misconfigured
from celery5.scaling.strategies import get_autoscale, get_prioritisation

FILE_POLL_INTERVAL = 1.0
"""Seconds between two looks at a file."""
REDIS_POLL_INTERVAL = 10.0
"""Seconds between two looks at a hash in Redis: an idle worker sends one command a second at most, in all."""


@runtime_checkable
class Configuration(Protocol):
    """A configuration backend. `where` is what errors call it."""

    @property
    def where(self) -> str: ...

    def load(self) -> Mapping[str, Any]:
        """The settings that are said there, by their names. May block. Raises Misconfigured."""
        ...

    async def watch(self) -> None:
        """Return when something may have changed since the last `load`; called under Trio, again and again."""
        ...


class ModuleConfiguration:
    """A Python module with settings for its names: `concurrency = 20`. The default backend.

    Each load runs the file anew, in a module of its own: nothing of the old one is left over, and what others have
    imported stays as it is.
    """

    def __init__(self, module: str) -> None:
        self.where: str = f"module {module}"
        self._module = module
        self._seen: object = None

    def load(self) -> Mapping[str, Any]:
        """The names of the module that are no imports, functions, classes or private."""
        path = self._path()
        self._seen = _state(path)
        fresh = ModuleType(self._module)
        fresh.__file__ = str(path)
        try:
            exec(compile(path.read_bytes(), str(path), "exec"), vars(fresh))
        except (Exception, SystemExit) as error:
            raise Misconfigured(f"{self.where} fails: {type(error).__name__}: {error}") from error
        return {name: value for name, value in vars(fresh).items() if _is_setting(name, value)}

    async def watch(self) -> None:
        """Wait until the file is another one."""
        await _until_other(lambda: _state(self._path()), lambda: self._seen, FILE_POLL_INTERVAL)

    def _path(self) -> Path:
        here = os.getcwd()
        if here not in sys.path:
            sys.path.insert(0, here)
        importlib.invalidate_caches()
        try:
            spec = importlib.util.find_spec(self._module)
        except (ImportError, ValueError) as error:
            raise Misconfigured(f"no configuration {self.where}: {error}") from None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise Misconfigured(
                f"no configuration {self.where}: looked in {here} and where Python is installed"
            )
        return Path(spec.origin)


class TomlConfiguration:
    """A TOML file; of a `pyproject.toml`, its table `[tool.celery5]`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self.where: str = f"file {self._path}"
        self._seen: object = None

    def load(self) -> Mapping[str, Any]:
        """The file's table."""
        self._seen = _state(self._path)
        try:
            table: dict[str, Any] = tomllib.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise Misconfigured(f"{self.where}: {error}") from None
        if self._path.name != "pyproject.toml":
            return table
        found = table.get("tool", {}).get("celery5", {})
        if not isinstance(found, dict):
            raise Misconfigured(f"{self.where}: [tool.celery5] is no table")
        return cast("dict[str, Any]", found)

    async def watch(self) -> None:
        """Wait until the file is another one."""
        await _until_other(lambda: _state(self._path), lambda: self._seen, FILE_POLL_INTERVAL)


class RedisConfiguration:
    """A hash in the broker's own Redis, which all workers of an application share: `HSET celery5:{shop}:settings
    concurrency 20`. It can set what `celery5.config.settings` marks for it: no address, no file, no name of
    code, and numbers
    up to a bound."""

    def __init__(self, endpoint: Endpoint, key: str) -> None:
        self.where: str = f"hash {key}"
        self._endpoint = endpoint
        self._key = key
        self._seen: object = None

    def load(self) -> Mapping[str, Any]:
        """The fields of the hash, as text."""
        self._seen = found = self._read()
        for name, raw in found.items():
            if fault := find_hash_fault(name, raw):
                raise Misconfigured(f"{self.where}: {fault}: HDEL {self._key} {name}")
        return found

    async def watch(self) -> None:
        """Wait until the hash says something else. A broker that is away has not changed it."""
        await _until_other(self._look, lambda: self._seen, REDIS_POLL_INTERVAL)

    def _look(self) -> object:
        try:
            return self._read()
        except BrokerError:
            return self._seen

    def _read(self) -> dict[str, str]:
        redis = BlockingRedis(self._endpoint, max_connections=1)
        try:
            return redis.perform(jobs.read_hash(self._key))
        finally:
            redis.close()


def make_configuration(
    source: "str | Configuration", *, broker: Callable[[], str], key: str
) -> Configuration:
    """The backend that is meant: `redis`, the path of a `.toml` file, the name of a module, or a backend of the user's
    own. Raises Misconfigured."""
    if not isinstance(source, str):
        if not isinstance(cast("object", source), Configuration):
            raise Misconfigured(
                f"config is {source!r}: give a module's name, the path of a .toml file, 'redis', or an object with "
                "where, load() and watch()"
            )
        return source
    if source == "redis":
        return RedisConfiguration(Endpoint.from_url(broker()), key)
    if source.endswith(".toml"):
        return TomlConfiguration(source)
    if source.endswith(".py") or not all(part.isidentifier() for part in source.split(".")):
        raise Misconfigured(
            f"config is {source!r}: give a module's name (shop.settings), a .toml file, or 'redis'"
        )
    return ModuleConfiguration(source)


def check_usable(settings: Settings, app: str, broker: str) -> Settings:
    """The same settings. Raises Misconfigured for what otherwise only whoever uses it finds wrong: by then the old ones
    would be gone. They were to be used with `broker` so far: another one must let us in. May block."""
    get_key_folder(app, settings.keys, os.environ)
    get_autoscale(settings)
    get_prioritisation(settings)
    try:
        endpoint = Endpoint.from_url(settings.broker)
        endpoint.ssl_context()
        if settings.broker != broker:
            redis = BlockingRedis(endpoint, max_connections=1)
            try:
                redis.perform(jobs.PING)
            finally:
                redis.close()
    except (BadBrokerURL, BrokerError) as error:
        raise Misconfigured(str(error)) from None
    return settings


def _is_setting(name: str, value: object) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType | FunctionType | type)


def _state(path: Path) -> object:
    """What changes when a file does, also when another one takes its place; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def _until_other(look: Callable[[], object], seen: Callable[[], object], every: float) -> None:
    """Look until what is there is not what was seen. A file that is gone is being replaced: that is no change yet."""
    import trio  # only a worker watches: a producer need not have it loaded

    while True:
        await trio.sleep(every)
        found = await trio.to_thread.run_sync(partial(_safely, look))  # which a stop waits for
        if found is not None and found != seen():
            return


def _safely(look: Callable[[], object]) -> object:
    try:
        return look()
    except Misconfigured:
        return None
