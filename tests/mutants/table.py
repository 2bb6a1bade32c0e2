"""The table of mutations: for each row of the parity table, one line of the code that breaks its main claim."""

from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutations.toml")


class Mutation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One change of one file that breaks the main claim of rows of the parity table."""

    rows: tuple[str, ...]
    # The path of the file in the project.
    file: str
    # Text that stands in the file exactly once, and what it becomes.
    find: str
    replace: str
    # The pytest node ids of which at least one must fail. Each of the rows names all of them.
    tests: tuple[str, ...]

    @property
    def title(self) -> str:
        """The rows and the change, in one line."""
        return f"{' '.join(self.rows)}: {self.file}: {self.find.strip()!r} -> {self.replace.strip()!r}"


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All mutations, and the rows that have none."""

    mutation: tuple[Mutation, ...]
    # Row: why there is no line of code that could break it.
    without: dict[str, str]
    # Rows whose mutation is still to be written. This list only gets shorter.
    todo: tuple[str, ...]


def read_table() -> Table:
    """Return the table. Raises `msgspec.ValidationError` for a field that is missing or unknown."""
    return msgspec.toml.decode(TABLE.read_bytes(), type=Table)


def mutate(text: str, mutation: Mutation) -> str:
    """Return the text of the file with the mutation.

    Raises:
        ValueError: what to find does not stand in the text exactly once, or nothing would change.
    """
    count = text.count(mutation.find)
    if count != 1 or mutation.find == mutation.replace:
        raise ValueError(f"{mutation.title}: found {count} times, must be once and change something")
    return text.replace(mutation.find, mutation.replace)
