"""Django: give each job usable connections to its databases, as each request of a web server gets.

Django keeps a connection for each thread, and closes those that are broken or too old at the start and the end of a
request. A worker has no requests: without this, one broken connection would fail every later job of its thread. The
middleware is there by itself in an application whose process has Django configured, and `celery5.contrib.django` is
where users import it from.
"""

import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from celery5.application import Application
from celery5.broker.colour import current_colour
from celery5.config.include import explain_import_error
from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.middleware.middleware import Middleware
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.context import LOG_EVENT
from celery5.runners.surrounding import CallBlock, FunctionCall

SETTINGS_VARIABLE = "DJANGO_SETTINGS_MODULE"
"""The variable that names Django's settings."""


ALLOW_VARIABLE = "DJANGO_ALLOW_ASYNC_UNSAFE"
"""Django's variable that allows queries on event loops."""
REFUSAL = (
    "Django cannot query a database on the Trio event loop, which would stand still: declare it with `def`, or with "
    "loop='asyncio' and await the asynchronous methods, such as acount() and aget(); in middleware use `calling`, "
    "which surrounds `def` tasks in their threads, or await record.adelay(...), a `def` task that does it"
)


def is_django_configured() -> bool:
    """Return whether this process has Django, with settings. Django itself is not imported."""
    settings = getattr(sys.modules.get("django.conf"), "settings", None)
    if settings is not None and settings.configured:
        return True
    return bool(os.environ.get(SETTINGS_VARIABLE)) and find_spec("django") is not None


def is_django_tested() -> bool:
    """Return whether this process runs the tests of a Django project, by Django's test runner or by pytest-django."""
    state = getattr(sys.modules.get("django.test.utils"), "_TestState", None)  # as Django itself asks
    return hasattr(state, "saved_data")


def set_up_django(prepare: Callable[[], None] = lambda: None) -> None:
    """Call `django.setup()`, where the environment names Django's settings and nobody has called it yet.

    A worker's code may import models then, and `INSTALLED_APPS` are ready, as in `manage.py`.

    Args:
        prepare: Called before, when the settings can be read.

    Raises:
        Misconfigured: The settings, or an app that they install, cannot be imported.
    """
    module = os.environ.get(SETTINGS_VARIABLE)
    if not module or find_spec("django") is None:
        return
    django: Any = import_module("django")
    if import_module("django.apps").apps.ready:
        return
    try:
        prepare()
        django.setup()
    except Misconfigured:
        raise
    except (Exception, SystemExit) as error:
        reason = explain_import_error(module, error)
        raise Misconfigured(
            f"{SETTINGS_VARIABLE} is {module!r}, and Django cannot be set up: {reason}"
        ) from error


class DjangoConnections(Middleware):
    """Closes the database connections of Django that are broken or too old, around each call of a worker.

    Around `def` code, also in a box, this happens in its thread, before and after it. Each asyncio job has a thread of
    its own for its queries, as a request under ASGI has, whose connections are closed with the job. On Trio queries are
    refused, since they would block the event loop: Django's own guard knows asyncio alone. With its variable
    DJANGO_ALLOW_ASYNC_UNSAFE they are not, and broken connections are closed, which all jobs of the loop share. That
    holds for all that runs on that loop, see `guard_event_loop`.

    A worker in a thread of another program is one of a test, which could not remove its database while a connection is
    open: there `def` code leaves none, but in the main thread, whose connections are those of the test.
    """

    def __init__(self) -> None:
        self._keeps_open = True

    def process_started(self, kind: str, name: str) -> None:
        """Find out whether this worker is in a thread of another program."""
        del kind, name
        self._keeps_open = threading.current_thread() is threading.main_thread()

    def added(self, app: Application) -> None:
        """Raise Misconfigured where Django is not installed."""
        del app
        if find_spec("django") is None:
            raise Misconfigured(f"celery5.contrib.django needs Django: {describe_installation('django')}")

    def calling(self, call: FunctionCall) -> CallBlock:
        """Return what surrounds a call."""
        if call.kind == "thread":
            if not self._keeps_open and threading.current_thread() is threading.main_thread():
                return None
            return _checking_connections(keeps_open=self._keeps_open)
        return _own_thread() if call.kind == "asyncio" else _dropping_broken()


@contextmanager
def _checking_connections(*, keeps_open: bool) -> Generator[None, None, None]:
    for connection in _list_connections():
        connection.queries_log.clear()  # with DEBUG it has every query
        _close_unless_usable(connection)
    try:
        yield
    finally:
        for connection in _list_connections():
            _close_unless_usable(connection)
        if not (keeps_open or threading.current_thread() is threading.main_thread()):
            _close_all()


def guard_event_loop(middleware: Iterable[Middleware]) -> None:
    """Refuse queries on the Trio event loop of this process, whoever makes them, where this middleware is used.

    A job is only one of those who run there: so do middleware, boot steps, checks, resources and services. So this
    belongs to the connections, each from its beginning, and not to the calls that may use them. It is first in its
    list, since a block of `execute_wrapper` takes the last one away.
    """
    if not any(isinstance(item, DjangoConnections) for item in middleware):
        return
    import_module("django.db.backends.signals").connection_created.connect(_guard_connection)
    for connection in _list_connections():
        _guard_connection(connection)


def _guard_connection(connection: Any, **_words: Any) -> None:
    if _refuse_on_trio not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _refuse_on_trio)


def _refuse_on_trio(
    execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Mapping[str, Any]
) -> Any:
    """Execute a query, unless a Trio task would wait for it: a wrapper as Django's `execute_wrappers` takes it."""
    if current_colour() == "trio" and not os.environ.get(ALLOW_VARIABLE):
        raise import_module("django.core.exceptions").SynchronousOnlyOperation(REFUSAL)
    return execute(sql, params, many, context)


@contextmanager
def _dropping_broken() -> Generator[None, None, None]:
    try:
        yield
    finally:
        for connection in _list_connections():
            if connection.errors_occurred and not connection.in_atomic_block:
                _close_unless_usable(connection)


@asynccontextmanager
async def _own_thread() -> AsyncGenerator[None, None]:
    """Run what `sync_to_async` calls in its own thread, which is made when it is first needed."""
    if "django.db" not in sys.modules:
        yield
        return
    asgiref: Any = import_module("asgiref.sync")  # Django brings it
    context = asgiref.ThreadSensitiveContext()
    async with context:
        try:
            yield
        finally:
            executor = asgiref.SyncToAsync.context_to_thread_executor.pop(context, None)
            if executor is not None:
                # Not awaited: the thread may still be in a query of a job that was cancelled.
                executor.submit(_close_all)
                executor.shutdown(wait=False)


def _close_all() -> None:
    for connection in _list_connections():
        _call_safely(connection.close)


def _list_connections() -> list[Any]:
    """Return the connections of this thread; none where nobody has imported Django's databases."""
    database: Any = sys.modules.get("django.db")
    if database is None:
        return []
    try:
        return list(database.connections.all(initialized_only=True))
    except Exception as error:  # the settings cannot be read: whoever uses a database will be told
        _log_failure(error)
        return []


def _close_unless_usable(connection: Any) -> None:
    """Close a connection that is broken or too old, and drop one whose transaction was left open.

    The threads belong to the worker, so nobody is inside of a transaction between two calls. A time limit that is
    raised in the middle of the end of a block may leave one open, and whatever followed would be part of it.
    """
    if connection.in_atomic_block:
        _call_safely(connection.close)
        database: Any = sys.modules["django.db"]
        _call_safely(lambda: database.connections.__delitem__(connection.alias))
        return
    if (
        connection.errors_occurred
    ):  # not every database can tell whether a connection is usable: sqlite says it always is
        _call_safely(connection.close)
    else:
        _call_safely(connection.close_if_unusable_or_obsolete)


def _call_safely(function: Any) -> None:
    """Call a method of a connection. Closing a broken one may fail, and leaves it closed all the same."""
    database: Any = sys.modules["django.db"]
    try:
        function()
    except (database.InterfaceError, database.DatabaseError):
        pass
    except Exception as error:
        _log_failure(error)


_LOGGED: set[str] = set()


def _log_failure(error: Exception) -> None:
    """Log a failure that is not one of the database, once for each kind."""
    kind = type(error).__qualname__
    if kind not in _LOGGED:
        _LOGGED.add(kind)
        why = describe_error(error, MAX_ERROR_LENGTH)
        LOG_EVENT.get()(
            "middleware:failed", "warning", middleware="DjangoConnections", hook="calling", why=why
        )
