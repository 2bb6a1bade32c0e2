"""The table of commands: each is a function of the keys and of the words behind its name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery5.testing.memory_server.keyspace import Keyspace
from celery5.testing.memory_server.replies import CommandError

Perform = Callable[[Keyspace, list[bytes]], Any]

NOT_INTEGER = "ERR value is not an integer or out of range"
NOT_FLOAT = "ERR value is not a valid float"
SYNTAX_ERROR = "ERR syntax error"
MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class KnownCommand:
    """A command: what performs it, and how many words it has at least, its own name apart."""

    perform: Perform
    words: int


COMMANDS: dict[bytes, KnownCommand] = {}


def command(name: str, words: int) -> Callable[[Perform], Perform]:
    """Enter a function into the table."""

    def enter(perform: Perform) -> Perform:
        COMMANDS[name.encode()] = KnownCommand(perform, words)
        return perform

    return enter


def run_command(keys: Keyspace, name: bytes, args: list[bytes]) -> Any:
    """Perform a command of the table. Raises CommandError."""
    known = COMMANDS.get(name)
    if known is None:
        text = name.decode(errors="replace")
        raise CommandError(f"ERR unknown command '{text}', with args beginning with: ")
    try:
        if len(args) < known.words:
            raise IndexError
        return known.perform(keys, args)
    except IndexError:
        raise CommandError(f"ERR wrong number of arguments for '{name.decode().lower()}' command") from None


def parse_integer(word: bytes) -> int:
    """Return a whole number of 64 bits. Raises CommandError."""
    digits = word.removeprefix(b"-")
    if not digits.isdigit() or (len(digits) > 1 and digits.startswith(b"0")):
        raise CommandError(NOT_INTEGER)
    number = int(word)
    if not -MAX_INTEGER - 1 <= number <= MAX_INTEGER:
        raise CommandError(NOT_INTEGER)
    return number


def parse_float(word: bytes, error: str = NOT_FLOAT) -> float:
    """Return a number. Raises CommandError."""
    try:
        number = float(word)
    except ValueError:
        raise CommandError(error) from None
    if number != number or b"_" in word or word != word.strip():
        raise CommandError(error)
    return number


class CommandWords:
    """Words behind the fixed ones of a command, read one after another."""

    def __init__(self, words: list[bytes]) -> None:
        self._words = words
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._words)

    def take(self) -> bytes:
        """Return the next word. Raises CommandError if there is none."""
        if not self:
            raise CommandError(SYNTAX_ERROR)
        self._at += 1
        return self._words[self._at - 1]

    def take_upper(self) -> bytes:
        """Return the next word in capital letters."""
        return self.take().upper()

    def take_integer(self) -> int:
        """Return the next word as a whole number."""
        return parse_integer(self.take())

    def skip(self, *words: bytes) -> bytes:
        """Skip the next word, if it is one of these, and return it; b"" otherwise."""
        if self and self._words[self._at].upper() in words:
            return self.take_upper()
        return b""

    def rest(self) -> list[bytes]:
        """Return all words that are left."""
        rest, self._at = self._words[self._at :], len(self._words)
        return rest


def slice_range(size: int, first: int, last: int) -> tuple[int, int]:
    """Return the positions that two indexes name, as LRANGE and ZRANGE count them: from the end, if negative."""
    start = max(first + size if first < 0 else first, 0)
    end = (last + size if last < 0 else min(last, size - 1)) + 1
    return start, max(start, end)


def scan_step(names: list[Any], cursor: int, count: int) -> tuple[int, list[Any]]:
    """Return where the next step of a scan begins, 0 at the end, and the names of this one."""
    end = cursor + count
    return (0 if end >= len(names) else end), names[cursor:end]
