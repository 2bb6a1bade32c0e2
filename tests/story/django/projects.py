"""Django projects that tests write, and what runs in them: Django has one configuration for each process.

These processes are forks of one that has imported Django, which takes 0.7 s of CPU. Those of `test_example.py` are not.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests.forking import ForkServer
from tests.story.cli.commands import LIMIT, Ended, Serving, environment

forks = ForkServer(
    "django.contrib.auth.hashers",
    "django.contrib.contenttypes.management",
    "django.core.handlers.asgi",
    "django.core.management.commands.migrate",
    "django.core.servers.basehttp",
    "django.db.backends.sqlite3.base",
    "django.forms",
    "django.test",
)
"""Has imported what needs no settings."""

MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
SETTINGS = """
SECRET_KEY = "of a test"
USE_TZ = True
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "db"}}}}
INSTALLED_APPS = ["celery5.contrib.django", {apps}]
CELERY5 = {{{celery5}}}
"""


class Project:
    """A project named `shop` in a folder."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.env = env
        self.write("manage.py", MANAGE)
        self.write("shop/__init__.py", "")
        self.configure()

    def configure(self, apps: str = "", celery5: str = "") -> None:
        """Write the settings: the items of INSTALLED_APPS besides ours, and those of CELERY5."""
        self.write("shop/settings.py", SETTINGS.format(apps=apps, celery5=celery5))

    def write(self, path: str, text: str) -> None:
        """Write a file, with its package where that is missing."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.parent != self.folder:
            (file.parent / "__init__.py").touch()
        file.write_text(dedent(text))

    def manage(self, *words: object, **env: str) -> Ended:
        """Run `manage.py`."""
        return self._run([sys.executable, "manage.py", *map(str, words)], env)

    def run(self, script: str, **env: str) -> str:
        """Return what a script prints after `django.setup()`, with every warning an error."""
        text = f"import django\ndjango.setup()\n{dedent(script)}"
        ended = self._run(
            [sys.executable, "-W", "error", "-c", text], {"DJANGO_SETTINGS_MODULE": "shop.settings", **env}
        )
        assert (ended.code, ended.err) == (0, ""), ended.err
        return ended.out

    def python(self, script: str) -> Ended:
        """Run a script that sets Django up itself."""
        return self._run([sys.executable, "-c", dedent(script)], {"DJANGO_SETTINGS_MODULE": "shop.settings"})

    def celery5(self, *words: object, **env: str) -> Ended:
        """Run the command `celery5` with the settings of the project in the environment."""
        command = [sys.executable, "-m", "celery5", *map(str, words)]
        return self._run(command, {"DJANGO_SETTINGS_MODULE": "shop.settings", **env})

    def serve(self, *words: object, **env: str) -> Serving:
        """Start `manage.py celery5 ...`, which serves."""
        program = [sys.executable, "manage.py", "celery5"]
        return Serving(*words, cwd=self.folder, env={**self.env, **env}, program=program, server=forks)

    def _run(self, command: list[str], env: Mapping[str, str]) -> Ended:
        environ = environment(**{**self.env, **env})
        assert forks.can_start(command, environ)
        return Ended(*forks.run(command[1:], cwd=self.folder, env=environ, timeout=LIMIT))
