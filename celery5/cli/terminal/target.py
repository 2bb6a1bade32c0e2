"""Name the application that a command is for, and load it when the command needs it."""

from typing import TYPE_CHECKING, NamedTuple

from celery5.cli.terminal.output import echo, to_one_line
from celery5.errors import Misconfigured
from celery5.lazy_modules import without_garbage_collection

if TYPE_CHECKING:
    from celery5.app import App


class Target(NamedTuple):
    """The values of `-A` or `CELERY5_APP`, or of `--app-name` or `CELERY5_APP_NAME`; '' for none.

    At most one of `name` and `app_name` is set. `other` is the value that does not count, since both are given.
    """

    name: str
    app_name: str = ""
    other: str = ""

    def load(self, *, serves: bool = False, needs_code: bool = False) -> "App":
        """Return the application. Raises Misconfigured when none was named, CannotLoad when there is no such
        application.

        A command that only reads Redis, or sends commands to processes, ignores a wrong configuration and warns:
        workers keep the settings that they had. It does not need the application's code either: with `app_name` it
        uses an application of that name with nothing declared. A command that `serves`, or `needs_code` for another
        reason, refuses both.
        """
        # A probe of a container needs no application and must import as little as possible.
        with without_garbage_collection():
            from celery5.cli.terminal.loading import CannotLoad, MisspeltTarget, app_without_code, load_app

        needs_code = needs_code or serves
        if self.app_name and needs_code:
            raise Misconfigured(
                "this command needs the application's code: write celery5 -A module[:app] COMMAND, "
                f"instead of --app-name {self.app_name}"
            )
        if not (self.name or self.app_name):
            hint = "" if needs_code else f"; {_WITHOUT_CODE}"
            raise Misconfigured(
                f"which application? write celery5 -A module[:app] COMMAND, or set CELERY5_APP{hint}"
            )
        try:
            with without_garbage_collection():
                app = app_without_code(self.app_name) if self.app_name else load_app(self.name)
        except CannotLoad as error:
            if needs_code or isinstance(error, MisspeltTarget):
                raise
            raise CannotLoad(f"{error}; {_WITHOUT_CODE}") from error
        if not serves:
            _record_as_command()
        if not serves and app.config is not None:
            try:
                _ = app.settings
            except Misconfigured as error:
                echo(f"Warning: going on without the configuration: {to_one_line(str(error))}", err=True)
                app.use_config(None)
        return app


def _record_as_command() -> None:
    """Have the audit trail say that what this command does came from the command line."""
    import click

    from celery5.audit.actor import acting

    context = click.get_current_context(silent=True)
    if context is not None:
        context.with_resource(acting("", "cli"))


_WITHOUT_CODE = (
    "this command does not need the application's code: "
    "CELERY5_BROKER=redis://HOST:6379/0 celery5 --app-name NAME COMMAND"
)
