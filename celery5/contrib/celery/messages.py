"""Translate a message of Celery's protocol 2 into a job."""

import zlib
from datetime import datetime, tzinfo
from importlib import import_module
from typing import Any

import msgspec

from celery5.app import App
from celery5.protocol.job.job import Job, hash_call
from celery5.protocol.masking import MAX_ERROR_LENGTH, get_error_text

_JSON = frozenset({"application/json"})
_GZIP = "application/x-gzip"
"""What kombu calls a body that zlib has compressed."""
_BODY = tuple[list[Any], dict[str, Any], dict[str, Any]]
"""Arguments, keyword arguments, and what is to be done after the job."""
_CANVAS = {"callbacks": "link", "errbacks": "link_error", "chain": "chain", "chord": "chord"}
"""The fields of a message that name calls to make after its job, and their names in Celery's API."""


class Untranslatable(Exception):
    """A message that no job can be made of; the text says why."""


class CeleryMessage(msgspec.Struct, frozen=True):
    """A message as kombu has it, its body still encoded."""

    body: bytes = b""
    content_type: str = ""
    content_encoding: str = ""
    headers: dict[str, Any] = {}
    properties: dict[str, Any] = {}

    @property
    def task(self) -> str:
        """The name of its task; '' when it has none."""
        return self._get_text("task")

    @property
    def id(self) -> str:
        """The id of its job; one made from its body when it has none."""
        return self._get_text("id") or hash_call(self.body)

    def _get_text(self, name: str) -> str:
        value = self.headers.get(name)
        return value if isinstance(value, str) else ""


class MessageRules(msgspec.Struct, frozen=True):
    """How messages of one broker become jobs."""

    # The time zone of times that name none.
    zone: tzinfo
    # Whether 0 is the highest priority, as in Redis; in RabbitMQ it is the lowest.
    is_zero_first: bool
    # The seconds for which the id of a job is known.
    remember: float


def make_job(app: App, message: CeleryMessage, rules: MessageRules) -> Job:
    """Return the job of a message, with the same id.

    Raises:
        Untranslatable: It is no message of protocol 2, its body is no JSON, it wants more than its job (a chain, a
            chord, a link), or the application has no such task with such arguments.
    """
    try:
        return _make_job(app, message, rules)
    except Untranslatable:
        raise
    except Exception as error:  # whatever a message has in it, it must not stop those behind it
        raise Untranslatable(get_error_text(error, MAX_ERROR_LENGTH)) from None


def _make_job(app: App, message: CeleryMessage, rules: MessageRules) -> Job:
    if not message.task:
        raise Untranslatable("it has no header 'task': only messages of Celery's protocol 2 are taken")
    args, kwargs, embed = _read_body(message, app.settings.message_limit)
    wants = [word for name, word in _CANVAS.items() if embed.get(name)]
    if wants:
        raise Untranslatable(
            f"it has a {wants[0]}, which only Celery can continue: send it to a worker of Celery's"
        )
    task = app.tasks[message.task]  # raises UnknownTask
    options = _read_options(message, rules)
    retries = message.headers.get("retries")
    if isinstance(retries, int) and retries > 0:  # attempts that Celery has made
        options["max_retries"] = max(0, task.policy.max_retries - retries)
    if task.send_options.unique_for is None:
        # The id alone is forgotten with the result, and a message may come again later.
        options["results_ttl"] = task.send_options.results_ttl or app.settings.results_ttl
        options["key"], options["unique_for"] = f"celery {message.id}", rules.remember
    return task.options(**options).job(*args, **kwargs)


def _read_options(message: CeleryMessage, rules: MessageRules) -> dict[str, Any]:
    headers = message.headers
    options: dict[str, Any] = {"id": message.id}
    for name in ("eta", "expires"):
        if headers.get(name) is not None:
            options[name] = _read_time(headers[name], rules.zone)
    limits = zip(("time_limit", "soft_time_limit"), headers.get("timelimit") or (), strict=False)
    options |= {name: limit for name, limit in limits if limit is not None}
    if headers.get("ignore_result"):
        options["ignore_result"] = True
    priority = _read_priority(message.properties.get("priority"), is_zero_first=rules.is_zero_first)
    if priority is not None:
        options["priority"] = priority
    return options


def _read_time(value: object, zone: tzinfo) -> datetime:
    time = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return time if time.tzinfo is not None else time.replace(tzinfo=zone)


def _read_priority(number: object, *, is_zero_first: bool) -> str | None:
    """Return our name of a priority from 0 to 9; None for 0, the priority of a message that was sent without any."""
    if not isinstance(number, int) or number <= 0:
        return None
    words = ("high", "normal", "low") if is_zero_first else ("low", "normal", "high")
    return words[min(2, (number - 1) // 3)]


def _read_body(message: CeleryMessage, limit: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return arguments, keyword arguments and the rest. Nothing is ever unpickled."""
    body = _decompress(message, limit)
    if len(body) > limit:
        raise Untranslatable(f"its {len(body)} bytes are over the limit of {limit}: raise message_limit")
    if message.content_type not in _JSON:
        raise Untranslatable(f"its body is {message.content_type or 'of no type'!r}, and only JSON is read")
    loads: Any = import_module(
        "kombu.serialization"
    ).loads  # it knows kombu's form of dates, UUIDs and decimals
    content = loads(body, message.content_type, message.content_encoding or "utf-8", accept=_JSON)
    try:
        parts: tuple[list[Any], dict[str, Any], dict[str, Any]] = msgspec.convert(content, _BODY)
        return parts
    except ValueError:
        raise Untranslatable("its body is not [args, kwargs, embed], as in Celery's protocol 2") from None


def _decompress(message: CeleryMessage, limit: int) -> bytes:
    compression = message.headers.get("compression")
    if not compression:
        return message.body
    if compression != _GZIP:
        raise Untranslatable(f"its body is compressed as {compression!r}, and only {_GZIP!r} is read")
    return zlib.decompressobj().decompress(message.body, limit + 1)
