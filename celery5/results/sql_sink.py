"""SQL Sink: documents as rows of a table, by SQLAlchemy: each of them once.

SQLAlchemy is imported when the first document comes; it is an extra, `celery5[sql]`.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.events.documents import ResultDocument
from celery5.results.sinks import BATCH, TIMEOUT

if TYPE_CHECKING:
    from sqlalchemy import Engine, Table

Row = Callable[[ResultDocument], Mapping[str, Any]]
"""Makes a row, by the names of columns, of a document."""

NEEDS = "an SQLSink needs SQLAlchemy: pip install 'celery5[sql]'"
"""What is said where there is none."""
RACES = 5
"""How often a batch is begun anew since another Router was just writing the same documents."""


class SQLSink:
    """A Data Sink that has a row for each document in a table of the database at `url`, as SQLAlchemy spells it.

    `table` is its name: it is made if it is not there, with the columns of `ResultDocument`, `value` as JSON, and `id`
    as the primary key. Or it is a `sqlalchemy.Table` of your own; then `row` makes a row of a document, and `key` names
    the column, unique in the table, that has the document's id. A document that is there already is left alone, so it
    is there once, however often it comes. `engine` are further arguments of `create_engine`. `name` is the table's
    unless given; `on`, `batch`, `timeout` and `retry` are those of `Sink`. Raises Misconfigured.
    """

    def __init__(
        self,
        url: str,
        table: "str | Table" = "results",
        *,
        row: Row | None = None,
        key: str = "id",
        engine: Mapping[str, Any] | None = None,
        name: str = "",
        on: str | Collection[str] = ("SUCCESS",),
        batch: int = BATCH,
        timeout: float = TIMEOUT,
        retry: Any = None,
    ) -> None:
        if row is None and not isinstance(table, str):
            raise Misconfigured(f"sink table {table}: say with row= how a row is made of a document")
        self.name: str = name or str(table)
        self.on: str | Collection[str] = on
        self.batch: int = batch
        self.timeout: float = timeout
        self.retry: Any = retry
        self._url = url
        self._table = table
        self._row = row or _row
        self._key = key
        self._more = dict(engine or {})
        self._lock = threading.Lock()
        self._opened: tuple[Engine, Table] | None = None

    def __repr__(self) -> str:
        return f"SQLSink({self.name!r})"  # a URL may hold a password

    def check(self) -> None:
        """Raises Misconfigured where there is no SQLAlchemy."""
        if find_spec("sqlalchemy") is None:
            raise Misconfigured(f"sink {self.name!r}: {NEEDS}")

    def write(self, documents: Sequence[ResultDocument], /) -> None:
        """Insert those that are not there yet, in one transaction."""
        engine, table = self._open()
        from sqlalchemy.exc import IntegrityError

        # A batch may hold a document twice: it was delivered, nobody heard of it, and here it is again.
        rows = {each.id: {**self._row(each)} for each in documents}
        for race in range(RACES):
            try:
                self._insert(engine, table, rows)
                return
            except IntegrityError:  # another Router was first with one of them; or the row is wrong
                if race == RACES - 1:
                    raise

    def close(self) -> None:
        """Close the connections. They open again when needed."""
        with self._lock:
            if self._opened is not None:
                self._opened[0].dispose()
                self._opened = None

    def _insert(self, engine: "Engine", table: "Table", rows: Mapping[str, Mapping[str, Any]]) -> None:
        from sqlalchemy import insert, select

        key = table.c[self._key]
        with engine.begin() as connection:
            there = set(connection.execute(select(key).where(key.in_(list(rows)))).scalars())
            missing = [dict(row) for name, row in rows.items() if name not in there]
            if missing:
                connection.execute(insert(table), missing)

    def _open(self) -> "tuple[Engine, Table]":
        with self._lock:
            if self._opened is None:
                try:
                    from sqlalchemy import create_engine
                except ImportError:
                    raise Misconfigured(NEEDS) from None
                engine = create_engine(self._url, **self._more)
                table = self._table if not isinstance(self._table, str) else _made(self._table, engine)
                if self._key not in table.c:
                    raise Misconfigured(
                        f"table {table.name!r} has no column {self._key!r} for the document's id"
                    )
                self._opened = engine, table
            return self._opened


def _made(name: str, engine: "Engine") -> "Table":
    """The table of that name, which is made if it is not there."""
    from sqlalchemy import JSON, Column, Float, Integer, MetaData, String, Table, Text
    from sqlalchemy.exc import DatabaseError

    table = Table(
        name,
        MetaData(),
        Column("id", String(255), primary_key=True),
        Column("job", String(255), nullable=False, index=True),
        Column("task", String(255), nullable=False, index=True),
        Column("queue", String(255), nullable=False),
        Column("state", String(20), nullable=False),
        Column("value", JSON),
        Column("error", Text),
        Column("failure", JSON),
        Column("reason", Text),
        Column("attempt", Integer),
        Column("worker", String(255)),
        Column("sent", Float(53)),
        Column("started", Float(53)),
        Column("finished", Float(53)),
    )
    try:
        table.metadata.create_all(engine)
    except DatabaseError:  # another Router may just have made it
        table.metadata.create_all(engine)
    return table


def _row(document: ResultDocument) -> dict[str, Any]:
    fields = {name: getattr(document, name) for name in document.__struct_fields__}
    return {**fields, "failure": msgspec.to_builtins(document.failure)}
