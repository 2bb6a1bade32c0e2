"""A Data Sink that stores outcomes in the result backend of Celery, for its callers that wait."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from celery5.contrib.celery.receivers import make_celery
from celery5.errors import Misconfigured
from celery5.protocol.events.documents import RESULT_STATES, ResultDocument


class CeleryResults:
    """Stores how jobs end in Celery's result backend, where `AsyncResult(id).get()` of Celery finds it.

    Args:
        celery: The application of Celery; or the URL of its result backend.
        name: The name of the sink.

    Raises:
        Misconfigured: Celery is not installed.
    """

    on = RESULT_STATES
    """Celery's caller waits for any end."""

    def __init__(self, celery: Any, *, name: str = "celery-results") -> None:
        self.name = name
        self._celery = make_celery(celery, "backend")

    def check(self) -> None:
        """Raise Misconfigured when the application of Celery has no result backend that others can write to."""
        kind = type(self._celery.backend).__name__
        if kind in ("DisabledBackend", "RPCBackend"):
            raise Misconfigured(
                f"sink {self.name!r}: Celery's result backend is {self._celery.conf.result_backend or 'not set'}; "
                "give one that stores results, such as redis://"
            )

    def write(self, documents: Sequence[ResultDocument], /) -> None:
        """Store outcomes. One that is stored already is stored again."""
        backend = self._celery.backend
        for document in documents:
            result, state = _read_outcome(document)
            traceback = document.failure.traceback if document.failure else None
            backend.store_result(document.job, result, state, traceback=traceback)


def _read_outcome(document: ResultDocument) -> tuple[Any, str]:
    """Return the result as Celery has it, and the state in its words. It knows no other final states than these."""
    if document.state == "SUCCESS":
        return document.value, "SUCCESS"
    if document.state == "DEAD" and document.failure is not None:
        return _make_error(document.failure.type, document.failure.message), "FAILURE"
    if document.state == "DEAD":
        return _make_error("RuntimeError", document.reason or document.error), "FAILURE"
    revoked: Any = import_module("celery.exceptions").TaskRevokedError
    return revoked(document.reason or document.state.lower()), "REVOKED"


def _make_error(kind: str, message: str) -> Exception:
    """Return an error that Celery stores under the name of the real one: the class may not be importable here."""
    module, _, name = kind.rpartition(".")
    error: type[Exception] = type(name, (Exception,), {"__module__": module or "builtins"})
    return error(message)
