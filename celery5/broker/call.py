"""Call: one trip to Redis as a value: what is sent, how the answer is read, whether it may be sent twice.

A driver performs calls and is the only thing with a colour (blocking, asyncio, Trio). Decoding stays here, pure.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from celery5.broker.full_memory import FIRST_WRITES
from celery5.broker.keys import VIRTUAL_TIME
from celery5.broker.wall_clock import WALL_CLOCK

T = TypeVar("T", covariant=True)
R = TypeVar("R")

Word = str | bytes | int | float


_FOLDER = Path(__file__).parent / "lua"


@cache
def _lua(name: str) -> str:
    with open(f"{_FOLDER}/{name}.lua", encoding="utf-8") as file:
        return file.read()


def _read_libs(libs: Sequence[str]) -> str:
    return "".join(_lua(f"lib/{lib}") for lib in libs)


_ON_DEMAND = "-- libs\n"


class Script(msgspec.Struct, frozen=True):
    """A Lua script: `name` of its file, its `body`, and the `sha` under which Redis knows it."""

    name: str
    body: str
    sha: str

    @classmethod
    def load(cls, path: str, *libs: str, on_demand: Sequence[str] = (), inner: str = "") -> "Script":
        """Read a script of the package. One that runs when memory is full begins with a write that takes none.

        Args:
            path: The file below `lua/`, without its suffix: `job/publish`.
            libs: Files below `lua/lib/` whose functions the script uses. They are put in front of it, and know
                nothing of it but what they are given.
            on_demand: Such files too, put in place of the script's line `-- libs`. To make functions takes time, so a
                script may do it only when it needs them.
            inner: Another script that this one calls as a function, named like its file, with other tables in place
                of KEYS and ARGV. All libraries of both are `libs`.
        """
        body = _lua(path)
        if inner:
            function = inner.rpartition("/")[2]
            body = f"local function {function}(KEYS, ARGV)\n{_lua(inner)}end\n{body}"
        if on_demand:
            body = body.replace(_ON_DEMAND, _read_libs(on_demand))
        name = path.rpartition("/")[2]
        return cls.of(name, FIRST_WRITES.get(name, "") + _read_libs(libs) + body)

    @classmethod
    def of(cls, name: str, body: str) -> "Script":
        """Return the script of that name with that text."""
        return cls(name, body, sha1(body.encode(), usedforsecurity=False).hexdigest())


VIRTUAL = frozenset(
    {
        "advance",
        "publish_unique",
        "get_due_schedules",
        "inspect_job",
        "promote",
        "record_progress",
        "revoke",
        "schedule",
        "settle",
        "settle_limited",
    }
)
"""The scripts that go by virtual time where a test sets it: those that keep jobs, runs and schedules until their time.
All others go by real time: leases above all."""


@cache
def make_virtual(script: Script) -> Script:
    """Return a script that goes by the time that a test has set on the server."""
    if script.name not in VIRTUAL:
        return script
    clock = f"local virtual_time = '{VIRTUAL_TIME}'\n{_lua('lib/virtual_clock')}"
    return Script.of(script.name, script.body.replace(_lua("lib/clock"), clock))


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One command, described but not made."""

    # The command as sent.
    words: tuple[Word, ...]
    # Turns the raw reply (bytes, int, None, lists of them) into a value.
    decode: Callable[[Any], T]
    script: Script | None = None
    # It may be sent again when nobody knows whether it ran.
    repeatable: bool = False
    # Seconds for which the server may hold the reply back.
    blocks: float = 0.0
    # Makes one value of those of several brokers, for a call that goes to all of them. None: it goes to one.
    merge: Callable[[Sequence[T]], T] | None = None

    @property
    def with_script_text(self) -> tuple[Word, ...]:
        """The same call with the script's text, for a server that does not know the script (it runs and caches it)."""
        if self.script is None:
            return self.words
        return ("EVAL", self.script.body, *self.words[2:])


def decode_text(raw: bytes) -> str:
    """Return `raw` as text. Bytes that are not UTF-8 become replacement characters: other programs may write, too."""
    return raw.decode(errors="replace")


def decode_scores(raw: Any) -> list[tuple[str, float]]:
    """Return the members of a sorted set with their scores: a reply WITHSCORES, of RESP2 or RESP3."""
    flat: list[Any] = list(raw)
    if flat and isinstance(flat[0], list):  # RESP 3
        return [(decode_text(member), float(score)) for member, score in flat]
    return [(decode_text(member), float(score)) for member, score in zip(flat[::2], flat[1::2], strict=True)]


def parse_int(raw: bytes | int | None) -> int:
    """Return the whole number that Redis keeps as `raw`, 0 for anything else: a field may hold `nan`, or be missing."""
    if isinstance(raw, int):
        return raw
    digits = (raw or b"").removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return 0
    return int(raw or 0)


_MOST_DIGITS = 19
"""Digits of the largest number that Redis itself counts with."""


def to_ms(seconds: float) -> int:
    """Return whole milliseconds, as the scripts take times."""
    return int(seconds * 1000)


def parse_seconds(ms: int) -> float | None:
    """Return the seconds of a script's reply in ms; None for -1, with which the scripts say that there is none."""
    return None if ms < 0 else ms / 1000


def script_call(
    script: Script,
    keys: tuple[str, ...],
    args: tuple[Word, ...],
    reply: Callable[[Any], R],
    *,
    repeatable: bool = False,
    merge: Callable[[Sequence[R]], R] | None = None,
) -> Call[R]:
    """Return a call of `script` by its hash."""
    if WALL_CLOCK.is_virtual:
        script = make_virtual(script)
    words = ("EVALSHA", script.sha, len(keys), *keys, *args)
    return Call(words, reply, script, repeatable, merge=merge)


def merge_names(replies: Sequence[Iterable[str]]) -> list[str]:
    """Return the names that any of several brokers lists, sorted."""
    return sorted({name for names in replies for name in names})


def merge_name_tuples(replies: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that any of several brokers lists, sorted."""
    return tuple(merge_names(replies))
