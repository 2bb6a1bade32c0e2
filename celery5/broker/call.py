"""A call: one command to Redis as a value, with the decoder of its reply and whether it may be sent twice.

A driver performs calls and is the only thing with a colour (blocking, asyncio, Trio). Decoding is pure.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files
from typing import Any, Generic, TypeVar

T = TypeVar("T", covariant=True)
R = TypeVar("R")

Word = str | bytes | int | float


def _lua(name: str) -> str:
    return files("celery5.broker").joinpath("lua", f"{name}.lua").read_text()


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script."""

    name: str  # of its file
    body: str
    sha: str  # the hash under which Redis knows it

    @classmethod
    def load(cls, path: str, *libs: str, inner: str = "") -> "Script":
        """Read a script of the package.

        Args:
            path: The file below `lua/`, without its suffix: `job/publish`.
            libs: Files below `lua/lib/` whose functions the script uses. They are put in front.
            inner: Another script that this one calls as a function, named like its file, with tables of its own in
                place of KEYS and ARGV.
        """
        body = _lua(path)
        if inner:
            function = inner.rpartition("/")[2]
            body = f"local function {function}(KEYS, ARGV)\n{_lua(inner)}end\n{body}"
        body = "".join(_lua(f"lib/{lib}") for lib in libs) + body
        return cls(path.rpartition("/")[2], body, sha1(body.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
<<<<<<< HEAD
    """One command, described but not made."""
=======
    """One command, described but not sent."""
>>>>>>> 5c2e54a (Say in plain words what boxes and connections do)

    # The command as sent.
    words: tuple[Word, ...]
<<<<<<< HEAD
    # Turns the raw reply (bytes, int, None, lists of them) into a value.
=======
    """The command as it is sent."""
>>>>>>> 5c2e54a (Say in plain words what boxes and connections do)
    decode: Callable[[Any], T]
    """Turns the raw reply (bytes, int, None, lists of them) into a value."""
    script: Script | None = None
    # It may be sent again when nobody knows whether it ran.
    repeatable: bool = False
<<<<<<< HEAD
    # Seconds for which the server may hold the reply back.
    blocks: float = 0.0
    # Makes one value of those of several brokers, for a call that goes to all of them. None: it goes to one.
    merge: Callable[[Sequence[T]], T] | None = None
=======
    """Whether it may be sent again when nobody knows whether it ran."""
    blocks: float = 0.0
    """Seconds that the server may hold the reply back."""
>>>>>>> 5c2e54a (Say in plain words what boxes and connections do)

    @property
    def with_script_text(self) -> tuple[Word, ...]:
        """The command with the script's text, for a server that does not know the script: it runs and caches it."""
        if self.script is None:
            return self.words
        return ("EVAL", self.script.body, *self.words[2:])


def decode_text(raw: bytes) -> str:
    """Return `raw` as text. Bytes that are not UTF-8 become replacement characters: other programs may write there."""
    return raw.decode(errors="replace")


def parse_int(raw: bytes | int | None) -> int:
    """Return the whole number that `raw` holds; 0 for anything else: a field may hold `nan`, or be missing."""
    if isinstance(raw, int):
        return raw
    digits = (raw or b"").removeprefix(b"-")
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        return 0
    return int(raw or 0)


_MAX_DIGITS = 19
"""Digits of the largest number that Redis itself counts with."""


def script_call(
    script: Script,
    keys: tuple[str, ...],
    args: tuple[Word, ...],
    reply: Callable[[Any], R],
    *,
    repeatable: bool = False,
    merge: Callable[[Sequence[R]], R] | None = None,
) -> Call[R]:
<<<<<<< HEAD
    """Return a call of `script` by its hash."""
    words = ("EVALSHA", script.sha, len(keys), *keys, *args)
    return Call(words, reply, script, repeatable, merge=merge)


def merge_names(replies: Sequence[Iterable[str]]) -> list[str]:
    """Return the names that any of several brokers lists, sorted."""
    return sorted({name for names in replies for name in names})


def merge_name_tuples(replies: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names that any of several brokers lists, sorted."""
    return tuple(merge_names(replies))
=======
    """Return a call of `script`, by its hash."""
    return Call(("EVALSHA", script.sha, len(keys), *keys, *args), reply, script, repeatable)
>>>>>>> 5c2e54a (Say in plain words what boxes and connections do)
