"""Lua: which scripts there are, what they say without their comments, and which of them move jobs."""

import importlib
import pkgutil
import re
from pathlib import Path

from celery5.broker import calls
from celery5.broker.call import Script
from tests.house.sources import files

SCRIPTS = [path for path in files("celery5/broker/lua", suffix=".lua") if path.parent.name != "lib"]
"""The scripts. A file in `lib` is none: it is put in front of others."""

PLACE_CHANGE = re.compile(r"'(?:HSET|HDEL)', (?:at\.)?jobs\b")
FUNCTION = re.compile(r"(?ms)^local function (\w+)\(.*?^end$")


def strip_comments(text: str) -> str:
    """Return Lua source without its comments."""
    return re.sub(r"(?m)--.*$", "", text)


def body(path: Path) -> str:
    """Return a script without its comments."""
    return strip_comments(path.read_text())


def find_scripts_that_move_jobs() -> set[str]:
    """Return the names of the scripts that change the place of a job, themselves or by a function that they call."""
    return {script.name for script in loaded_scripts() if moves_jobs(strip_comments(script.body))}


def loaded_scripts() -> list[Script]:
    """Return the scripts that the calls load, as they are sent."""
    modules = [
        importlib.import_module(f"{calls.__name__}.{module.name}")
        for module in pkgutil.iter_modules(calls.__path__)
    ]
    names = [(module, name) for module in modules for name in dir(module)]  # which loads lazy modules, too
    return [value for module, name in names if isinstance(value := getattr(module, name), Script)]


def moves_jobs(text: str) -> bool:
    """Whether the source of a script changes the hash `jobs`. Functions that it does not call do not count."""
    functions = {found[1]: found[0] for found in FUNCTION.finditer(text)}
    reached, new = FUNCTION.sub("", text), True
    while new:
        called = [name for name in functions if re.search(rf"\b{name}\(", reached)]
        new = bool(called)
        reached += "".join(functions.pop(name) for name in called)
    return PLACE_CHANGE.search(reached) is not None
