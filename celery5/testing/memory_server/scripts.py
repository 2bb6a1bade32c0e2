"""Run Lua scripts as Redis does: with `redis.call`, cjson and cmsgpack, and without global variables of their own."""

from collections.abc import Callable
from hashlib import sha1
from typing import Any

from lupa.lua51 import LuaRuntime, lua_type

from celery5.testing.memory_server.lua_codecs import LuaJson, MessageReader, pack_message
from celery5.testing.memory_server.replies import (
    CommandError,
    Pairs,
    Status,
    StreamEntries,
    flatten,
    format_number,
)

BAD_ARGUMENT = "ERR Lua redis lib command arguments must be strings or integers"
PRELUDE = """
local perform, encode, decode, pack, unpack_message, null, sha1hex = ...
local raise = error
redis = {sha1hex = sha1hex}
function redis.call(...)
  local ok, reply = perform(...)
  if ok then return reply end
  raise(reply, 0)
end
function redis.pcall(...)
  local _, reply = perform(...)
  return reply
end
function redis.error_reply(text) return {err = text} end
function redis.status_reply(text) return {ok = text} end
cjson = {encode = encode, decode = decode, null = null}
cmsgpack = {pack = pack, unpack = unpack_message}
os, io, require, dofile, loadfile, package, module, newproxy, python = {clock = os.clock}, nil
local environment, set = _G, rawset
local function refuse(what)
  return function(_, name) raise('Script attempted to ' .. what .. " global variable '" .. tostring(name) .. "'", 2) end
end
setmetatable(environment, {__newindex = refuse('set a'), __index = refuse('access nonexistent')})
local protect, load = pcall, loadstring
local function run(script, keys, argv)
  set(environment, 'KEYS', keys)
  set(environment, 'ARGV', argv)
  return protect(script)
end
local function compile(text) return load(text, '=user_script') end
return run, compile
"""


class UnknownScript(Exception):
    """No script has that hash."""


class ScriptEngine:
    """All scripts of a server.

    Args:
        run_command: Performs a command; raises CommandError.
    """

    def __init__(self, run_command: Callable[[bytes, list[bytes]], Any]) -> None:
        self._run_command = run_command
        self._lua = LuaRuntime(
            encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False
        )
        self._to_table: Any = self._lua.table_from
        null = self._lua.execute(b"return newproxy()")
        codec = LuaJson(self._to_table, null)
        self._run, self._compile = self._lua.execute(
            PRELUDE.encode(), self._perform, codec.encode, codec.decode, self._pack, self._unpack, null, _hash
        )
        self._scripts: dict[bytes, Any] = {}

    def load(self, text: bytes) -> bytes:
        """Keep a script and return its hash. Raises CommandError if it is no Lua."""
        name = sha1(text, usedforsecurity=False).hexdigest().encode()
        if name not in self._scripts:
            compiled = self._compile(text)
            if isinstance(compiled, tuple):
                raise CommandError(f"ERR Error compiling script (new function): {_decode(compiled[1])}")
            self._scripts[name] = compiled
        return name

    def has(self, name: bytes) -> bool:
        """Whether a script has that hash."""
        return name in self._scripts

    def forget_all(self) -> None:
        """Remove all scripts."""
        self._scripts.clear()

    def run(self, name: bytes, keys: list[bytes], argv: list[bytes]) -> Any:
        """Run a script and return its reply. Raises UnknownScript, CommandError."""
        script = self._scripts.get(name.lower())
        if script is None:
            raise UnknownScript
        ok, value = _as_pair(self._run(script, self._to_table(keys), self._to_table(argv)))
        if ok:
            return _convert_reply(value)
        if isinstance(value, BaseException):
            raise value
        text = _decode(value[b"err"]) if lua_type(value) == "table" else f"ERR {_decode(value)}"
        raise CommandError(f"{text} script: {name.decode()}, on @user_script.")

    def _perform(self, *words: Any) -> tuple[bool, Any]:
        """Perform a command of a script: return whether it succeeded, and its reply or its error as a table."""
        try:
            args = [word if type(word) is bytes else _format_argument(word) for word in words]
            return True, self._convert(self._run_command(args[0].upper(), args[1:]))
        except CommandError as error:
            return False, self._to_table({b"err": str(error).encode()})

    def _convert(self, reply: Any) -> Any:
        """Return a reply as a value of Lua."""
        kind = reply.__class__
        if kind is bytes or kind is int:
            return reply
        if reply is None:
            return False
        if kind is Status:
            return self._to_table({b"ok": reply.encode()})
        if kind is float:
            return format_number(reply)
        if kind is dict:
            reply = flatten(reply.items())
        elif kind is Pairs:
            reply = flatten(reply)
        elif kind is StreamEntries:
            reply = reply.list_pairs()
        return self._to_table([self._convert(item) for item in reply])

    def _pack(self, *values: Any) -> bytes:
        return pack_message(values)

    def _unpack(self, data: bytes) -> Any:
        values = MessageReader(data, self._to_table).read_all()
        return values[0] if len(values) == 1 else values


def _hash(text: Any) -> bytes:
    """Return what `redis.sha1hex` does."""
    return (
        sha1(_format_argument(text) if type(text) is not bytes else text, usedforsecurity=False)
        .hexdigest()
        .encode()
    )


def _as_pair(values: Any) -> tuple[Any, Any]:
    """Return what Lua returned as two values: one that is nil is missing."""
    is_pair = values.__class__ is tuple
    return (values[0], values[1]) if is_pair else (values, None)


def _format_argument(word: Any) -> bytes:
    if type(word) is int:
        return b"%d" % word
    if type(word) is float:
        return repr(word).encode()
    raise CommandError(BAD_ARGUMENT)


def _convert_reply(value: Any) -> Any:
    """Return what a script returned as a reply."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, int | float):
        return int(value)
    if lua_type(value) != "table":
        return None
    if (status := value[b"ok"]) is not None:
        return Status(_decode(status))
    if (error := value[b"err"]) is not None:
        return CommandError(_decode(error))
    items, number = list[Any](), 1
    while (item := value[number]) is not None:
        items.append(_convert_reply(item))
        number += 1
    return items


def _decode(text: Any) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
