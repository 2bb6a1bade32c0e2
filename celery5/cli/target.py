"""Target: which application a command is about.

Floor: cli. Reads: nothing. Writes: nothing.
"""

from typing import TYPE_CHECKING, NamedTuple

from celery5.cli.said import echo, inline
from celery5.errors import Misconfigured

if TYPE_CHECKING:
    from celery5.app import App


class Target(NamedTuple):
    """What `-A` or `CELERY5_APP` says; '' when nothing was said."""

    name: str

    def load(self, *, serves: bool = False) -> "App":
        """The application. Raises Misconfigured when none was named, CannotLoad when there is no such application.

        Who only looks at workers or commands them does without a configuration that is wrong, and is warned: workers
        keep the settings that they had, and have to hear that it is wrong. Who `serves` would work with other settings
        than were meant.
        """
        if not self.name:
            raise Misconfigured(
                "which application? write celery5 -A module[:app] COMMAND, or set CELERY5_APP"
            )
        from celery5.cli.loading import load_app

        app = load_app(self.name)
        if not serves and app.config is not None:
            try:
                _ = app.settings
            except Misconfigured as error:
                echo(f"Warning: going on without the configuration: {inline(str(error))}", err=True)
                app.use_config(None)
        return app
