"""Find the commands of Redis in the source of Lua scripts."""

import re

_COMMAND = re.compile(r"\b(?:p?call|later|try)\(\s*(?:\w+,\s*)?'([A-Z]+)'(?:,\s*'([A-Z]+)')?")
_FUNCTION = re.compile(r"(?ms)^local function (\w+)\(.*?^end$")
_CONTAINERS = frozenset({"xgroup"})
"""Commands that are permitted by subcommand."""


def strip_lua_comments(text: str) -> str:
    """Return Lua source without its comments."""
    return re.sub(r"(?m)--.*$", "", text)


def find_lua_commands(text: str) -> frozenset[str]:
    """Return the commands in Lua source, as ACL SETUSER takes them: `hset`, `xgroup|create`."""
    return frozenset(
        f"{name}|{subcommand}".lower() if name.lower() in _CONTAINERS and subcommand else name.lower()
        for name, subcommand in _COMMAND.findall(text)
    )


def keep_reachable(text: str) -> str:
    """Return the part of a script that can run: without the functions of libraries that it does not call."""
    functions = {found[1]: found[0] for found in _FUNCTION.finditer(text)}
    reached, is_new = _FUNCTION.sub("", text), True
    while is_new:
        called = [name for name in functions if re.search(rf"\b{name}\b", reached)]
        is_new = bool(called)
        reached += "".join(functions.pop(name) for name in called)
    return reached
