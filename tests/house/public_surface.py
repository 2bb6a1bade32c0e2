"""The public surface: all names that docs/reference/compatibility.md promises to keep, each with its parts.

`python -m tests.house.public_surface` writes it to `public_surface.json`, at each release. What has come since may
still change; what is in the file must stay.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import click

import celery5
from celery5 import errors
from celery5.cli.main import cli
from celery5.config.settings import PREFIX, get_descriptions
from celery5.dashboard.openapi import make_openapi
from celery5.operations.table import OPERATIONS
from tests.house.commands_table import list_commands
from tests.house.log_events import collect_events, collect_metrics, find_sources
from tests.house.sources import HERE

FILE = HERE / "tests" / "house" / "public_surface.json"
REFERENCE = HERE / "docs" / "reference"
Names = dict[str, list[str]]
"""Names, each with its parts: parameters, flags, fields."""


def make_surface() -> dict[str, Names]:
    """Return the surface of this code: for each kind of name the names, sorted, with their parts, sorted."""
    kinds: Mapping[str, Callable[[], Names]] = {
        "python": list_python_names,
        "settings": lambda: {name: [PREFIX + name.upper()] for name in get_descriptions()},
        "commands": list_command_flags,
        "exit codes": list_exit_codes,
        "http routes": list_routes,
        "json": list_json_fields,
        "log events": lambda: {name: list(event.fields) for name, event in collect_events(HERE).items()},
        "metrics": list_metrics,
        "redis keys": list_keys,
    }
    return {
        kind: {name: sorted(set(parts)) for name, parts in sorted(make().items())}
        for kind, make in kinds.items()
    }


def find_removed(before: Mapping[str, Names], now: Mapping[str, Names]) -> list[str]:
    """Return one line for each name, and each part of a name, that was there before and is not there now."""
    removed: list[str] = []
    for kind, names in before.items():
        for name, parts in names.items():
            present = now.get(kind, {}).get(name)
            if present is None:
                removed.append(f"{kind}: {name}")
            else:
                removed += [f"{kind}: {part} of {name}" for part in parts if part not in present]
    return removed


def list_python_names() -> Names:
    """Return the names of the API reference with their parameters, and the public members of classes with theirs."""
    names: Names = {}
    rendered = re.findall(r"(?m)^::: (\S+)$", (REFERENCE / "api.md").read_text())
    offered = [f"celery5.{name}" for name in celery5.__all__]
    for path in {*rendered, *offered}:
        module, _, name = path.rpartition(".")
        # The values of these need a configured Django, and its newest version.
        if module.startswith("celery5.contrib."):
            names |= {path: []} if name in import_module(module).__all__ else {}
        else:
            names.update(_describe(path, getattr(import_module(module), name)))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            names.update(_describe(f"celery5.errors.{name}", value))
    return names


def _describe(path: str, value: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield a name with its parameters; for a class also its attributes, as `.name`, and each of its methods."""
    if not inspect.isclass(value):
        yield path, _list_parameters(value) if callable(value) else []
        return
    attributes: list[str] = []
    for name, member in inspect.getmembers_static(value):
        function = getattr(member, "__func__", member)
        if name.startswith("_") or not _is_ours(value, name):
            continue
        if inspect.isfunction(function):
            yield f"{path}.{name}", _list_parameters(function)
        else:
            attributes.append(f".{name}")
    attributes += [f".{name}" for name in inspect.get_annotations(value) if not name.startswith("_")]
    has_parameters = _is_ours(value, "__init__") and not getattr(value, "_is_protocol", False)
    yield path, [*(_list_parameters(value) if has_parameters else []), *attributes]


def _is_ours(kind: type, name: str) -> bool:
    """Return whether a member of a class is defined in this package."""
    return any(name in vars(base) for base in kind.__mro__ if base.__module__.startswith("celery5"))


def _list_parameters(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        stars.get(parameter.kind, "") + parameter.name
        for parameter in parameters
        if parameter.name not in ("self", "cls") and not parameter.name.startswith("_")
    ]


def list_command_flags() -> Names:
    """Return the commands with their flags and arguments."""
    flags: Names = {"": _list_flags(cli)}
    return flags | {name: _list_flags(command) for name, command in list_commands(cli)}


def _list_flags(command: click.Command) -> list[str]:
    return [
        name
        for param in command.params
        for name in (
            [*param.opts, *param.secondary_opts]
            if isinstance(param, click.Option)
            else [(param.name or "").upper()]
        )
    ]


def list_exit_codes() -> Names:
    """Return the exit codes that the guide lists."""
    section = (HERE / "docs" / "guide" / "cli.md").read_text().partition("\n## Exit codes\n")[2]
    return {code: [] for code in re.findall(r"(?m)^\| (\d+) \|", section)}


def list_routes() -> Names:
    """Return the routes of the JSON API with their parameters."""
    routes: Names = {}
    document = make_openapi()
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts = [parameter["name"] for parameter in route["parameters"]]
            if "requestBody" in route:
                reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                schema = document["components"]["schemas"][reference.rpartition("/")[2]]
                parts += schema["properties"]
            routes[f"{method.upper()} {path}"] = parts
    return routes


def list_json_fields() -> Names:
    """Return the objects of the JSON API and of `--json` with their fields."""
    parameters = {operation.parameters.__name__ for operation in OPERATIONS.values()}
    return {
        name: list(schema["properties"])
        for name, schema in make_openapi()["components"]["schemas"].items()
        if "properties" in schema and name not in parameters
    }


def list_metrics() -> Names:
    """Return the metrics with the labels that are written where they are made."""
    metrics: Names = {name: [] for name in collect_metrics(HERE)}
    for _, module in find_sources(HERE):
        for node in module:
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                labels = [
                    key for inner in ast.walk(node) if isinstance(inner, ast.Dict) for key in inner.keys
                ]
                metrics.get(str(node.args[0].value), []).extend(
                    str(key.value) for key in labels if isinstance(key, ast.Constant)
                )
    return metrics


def list_keys() -> Names:
    """Return the keys and channels in Redis with their types; tests hold the page against the code."""
    rows = re.findall(r"(?m)^\| `\w+` \| `([^`]+)` \| (\w[\w ]*) \|", (REFERENCE / "keys.md").read_text())
    return {key: [kind] for key, kind in rows}


def format_surface(surface: Mapping[str, Names]) -> str:
    """Return it as JSON with a line for each name."""
    kinds = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(parts)}" for name, parts in names.items())
        + "\n}"
        for kind, names in surface.items()
    ]
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(format_surface(make_surface()))
