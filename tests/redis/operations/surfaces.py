"""Add one file to the operations, as somebody does who adds an operation, and print what each surface has of it.

`python -m tests.redis.operations.surfaces FOLDER APP URL`, where FOLDER has the file.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from click.testing import CliRunner

import celery5.operations
from celery5 import App


def run(name: str, *words: str) -> str:
    from celery5.cli.main import cli

    result = CliRunner().invoke(cli, ["--app-name", name, *words], prog_name="celery5")
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result.output


def see_commands(name: str) -> dict[str, Any]:
    return {
        "help": run(name, "--help"),
        "wind --help": run(name, "toy", "wind", "--help"),
        "list": run(name, "toy", "list"),
        "list --json": run(name, "toy", "list", "--json"),
        "wind": run(name, "toy", "wind", "mouse", "--turns", "7"),
    }


async def see_dashboard(app: App) -> dict[str, Any]:
    from tests.redis.dashboard.client import Client  # when the file is there
    from tests.redis.dashboard.site import browsing

    async with browsing(app) as http:
        client = Client(http, app)
        openapi = (await http.get("/api/v1/openapi.json")).json()
        seen = {
            "form": await client.look("do/toy/wind"),
            "page": await client.load("do/toy/list"),
            "api": await client.ask("toy:list"),
            "openapi": {path: list(methods) for path, methods in openapi["paths"].items() if "/toy/" in path},
            "pressed": await client.press("toy:wind", toy="mouse", turns="5"),
        }
    async with browsing(app, role="operator") as http:
        seen["refused"] = await Client(http, app).press("toy:wind", toy="mouse", status=403)
    return seen


def main(arguments: Sequence[str]) -> None:
    import trio

    folder, name = arguments
    celery5.operations.__path__.append(folder)
    app = App(name)
    seen = see_commands(name) | trio.run(see_dashboard, app)
    from tests.house.commands_table import make_table

    seen["docs"] = [line for line in make_table().splitlines() if "`toy " in line]
    seen["audit"] = [
        (entry.source, entry.action, entry.target, entry.filter, entry.count, entry.outcome)
        for entry in app.audit.list(action="toy")
    ]
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
