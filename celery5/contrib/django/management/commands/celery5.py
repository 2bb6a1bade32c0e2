"""Run a command of celery5 for the application of the Django project (`manage.py celery5 worker start`)."""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from importlib import import_module
from typing import Any, Never

from django.core.management.base import BaseCommand

from celery5.app import App
from celery5.contrib.django.application import get_app


class DjangoCommand(BaseCommand):
    """Passes all arguments on to the command line of celery5, which knows the application already."""

    help: str = (
        "Run celery5's command line for the application of this project: workers, queues, dead letters, ..."
    )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command and exit with its code: `manage.py` leaves `argv` from the third word on to celery5."""
        words = drop_django_options(argv[2:])
        run_command(
            add_application(words), f"{os.path.basename(argv[0])} {argv[1]}", name_program(argv), words
        )

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print the help of celery5's command line, for `manage.py help celery5`."""
        run_command(["--help"], f"{os.path.basename(prog_name)} {subcommand}")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take all words, for `call_command("celery5", "queue", "list")`."""
        parser.add_argument("words", nargs=REMAINDER)

    def handle(self, *_args: Any, words: list[str], **_options: Any) -> None:
        """Run the command that `call_command` names, and exit with its code."""
        run_command(add_application(words))


Command = DjangoCommand
"""The name by which Django finds it."""


def drop_django_options(words: list[str]) -> list[str]:
    """Return the words without the options of `manage.py` itself, which it has obeyed already."""
    kept: list[str] = []
    following = iter(words)
    for word in following:
        if word in _DJANGO_OPTIONS:
            next(following, None)
        elif not word.startswith(tuple(f"{option}=" for option in _DJANGO_OPTIONS)):
            kept.append(word)
    return kept


_DJANGO_OPTIONS = ("--settings", "--pythonpath")


def add_application(words: list[str]) -> list[str]:
    """Return the words of a command with the application of this project, unless they name one."""
    if words[:1] and (words[0] in ("-A", "--app", "--app-name") or words[0].startswith(("-A", "--app="))):
        return words
    return ["-A", name_target(get_app()), *words]


def name_program(argv: list[str]) -> str:
    """Return what the user has written before the words of celery5: `python manage.py celery5`."""
    program = os.path.relpath(argv[0]) if os.sep in argv[0] and argv[0].endswith(".py") else argv[0]
    is_script = program.endswith(".py")
    return f"{'python ' if is_script else ''}{program if is_script else os.path.basename(program)} {argv[1]}"


def run_command(
    words: list[str], program: str = "celery5", shown_program: str = "", typed: list[str] | None = None
) -> Never:
    """Run a command of celery5 and exit with its code. The command line stands above this package: it is a program.

    Args:
        words: The words of the command.
        program: What help calls the program.
        shown_program: What shown commands begin with; default: `program`.
        typed: The words without the application that was added to them; default: `words`.
    """
    has_application = typed is not None and typed != words
    import_module("celery5.cli.main").main(
        words, program, shown_program=shown_program, has_application=has_application
    )
    raise AssertionError("the command line exits")


def name_target(app: App) -> str:
    """Return what `-A` takes for an application: the module that has it, and its name there."""
    for module in (app.module, *list(sys.modules)):
        names = list(getattr(sys.modules.get(module), "__dict__", {}).items())
        found = [name for name, value in names if value is app]
        if found:
            return f"{module}:{found[0]}"
    return app.module
