"""Target: which application a command is about.

Floor: cli. Reads: nothing. Writes: nothing.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery5.errors import Misconfigured

if TYPE_CHECKING:
    from celery5.app import App


@dataclass(frozen=True, slots=True)
class Target:
    """What `-A` or `CELERY5_APP` says; '' when nothing was said."""

    name: str

    def load(self) -> "App":
        """The application. Raises Misconfigured when none was named, CannotLoad when there is no such application."""
        if not self.name:
            raise Misconfigured(
                "which application? write celery5 -A module[:app] COMMAND, or set CELERY5_APP"
            )
        from celery5.cli.loading import load_app

        return load_app(self.name)
