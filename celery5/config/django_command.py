"""End a command of `manage.py` with one line of error, not a traceback, if celery5 refuses a module.

Django's settings often import the module of the `App`. At that time Django is not set up, and no command has begun.
"""

import sys
from traceback import walk_stack, walk_tb
from types import TracebackType

from celery5.config.include import explain_import_error
from celery5.config.settings import InvalidSettings
from celery5.errors import CeleryError


def is_django_command() -> bool:
    """Return whether a command of `manage.py` is running that should end with one line of error.

    Not `runserver`: Django shows the error, and waits until the file is changed.
    """
    return "runserver" not in sys.argv[1:2] and _is_management()


class RefusalReport:
    """An excepthook that prints one line for a module that celery5 refuses. The former hook prints other errors."""

    def __init__(self) -> None:
        self._report_others = sys.excepthook

    @classmethod
    def install(cls) -> None:
        """Install the hook in a command of `manage.py`, unless it has `--traceback`. Do nothing in other processes."""
        if not isinstance(sys.excepthook, cls) and "--traceback" not in sys.argv and _is_management():
            sys.excepthook = cls()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, /
    ) -> None:
        line = self.describe(error)
        if line:
            sys.stderr.write(f"{line}\n")
        else:
            self._report_others(kind, error, trace)

    def describe(self, error: BaseException) -> str:
        """Return the line for an error of celery5 that ended the import of a module; '' for any other error."""
        if not isinstance(error, CeleryError) or not (modules := list_imported(error)):
            return ""
        if isinstance(error, InvalidSettings) and not error.in_code:
            return f"Error: {error}"  # the environment is wrong, not the module that has read it
        return describe_failed_import(modules[0], error)


def describe_failed_import(module: str, error: BaseException) -> str:
    """Return the line of error for a module that fails while it is imported."""
    why = explain_import_error(module, error)
    return f"Error: module {module!r} fails while it is imported: {why}; --traceback shows all"


def list_imported(error: BaseException) -> list[str]:
    """Return the modules that were imported when an error was raised, the innermost first."""
    modules = [
        str(frame.f_globals.get("__name__"))
        for frame, _ in walk_tb(error.__traceback__)
        # Code of `manage.py shell` runs in the module of Django's command, so it is no import.
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename == frame.f_globals.get("__file__")
    ]
    return [name for name in reversed(modules) if name != "__main__"]


def _is_management() -> bool:
    """Return whether `manage.py` is among the callers, with any command."""
    name = "django.core.management"
    return name in sys.modules and any(
        frame.f_globals.get("__name__") == name for frame, _ in walk_stack(None)
    )
