"""A sink that stores documents as rows of a table, with SQLAlchemy: each of them once.

SQLAlchemy is imported when the first document arrives; it is an extra, `celery5[sql]`.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.protocol.events.documents import ResultDocument
from celery5.protocol.events.sinks import BATCH, TIMEOUT

if TYPE_CHECKING:
    from sqlalchemy import Engine, Table

Row = Callable[[ResultDocument], Mapping[str, Any]]
"""Returns the row of a document, by column."""

RACES = 5
"""Attempts at a batch while other Routers insert the same documents."""


class SQLSink:
    """A Data Sink that stores each document as a row in a table of a database.

    A document that is already in the table is left alone, so each has one row, however often it is delivered.

    Args:
        url: The database, as SQLAlchemy spells it.
        table: A name: the table is created if it is missing, with the columns of `ResultDocument`, `value` as JSON
            and `id` as the primary key. Or a `sqlalchemy.Table` of your own, together with `row`.
        row: Makes a row of a document.
        key: The column, unique in the table, that has the document's id.
        engine: More arguments of `create_engine`.
        name: The name of the sink; by default that of the table.
        on: As for `Sink`.
        batch: As for `Sink`.
        timeout: As for `Sink`.
        retry: As for `Sink`.

    Raises:
        Misconfigured: A table of your own is passed without `row`.
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
        """Raise Misconfigured when SQLAlchemy is not installed."""
        if find_spec("sqlalchemy") is None:
            raise Misconfigured(f"sink {self.name!r}: {_describe_missing()}")

    def write(self, documents: Sequence[ResultDocument], /) -> None:
        """Insert the documents that are not in the table, in one transaction."""
        engine, table = self._open()
        from sqlalchemy.exc import IntegrityError

        # A batch may have a document twice: it was delivered, not acknowledged, and delivered again.
        rows = {document.id: {**self._row(document)} for document in documents}
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
            existing = set(connection.execute(select(key).where(key.in_(list(rows)))).scalars())
            missing = [dict(row) for name, row in rows.items() if name not in existing]
            if missing:
                connection.execute(insert(table), missing)

    def _open(self) -> "tuple[Engine, Table]":
        with self._lock:
            if self._opened is None:
                try:
                    from sqlalchemy import create_engine
                except ImportError:
                    raise Misconfigured(_describe_missing()) from None
                engine = create_engine(self._url, **self._more)
                table = self._table if not isinstance(self._table, str) else _made(self._table, engine)
                if self._key not in table.c:
                    raise Misconfigured(
                        f"table {table.name!r} has no column {self._key!r} for the document's id"
                    )
                self._opened = engine, table
            return self._opened


def _made(name: str, engine: "Engine") -> "Table":
    """Return the table of that name, after creating it if it is missing."""
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


def _describe_missing() -> str:
    """Return the error without SQLAlchemy."""
    return f"an SQLSink needs SQLAlchemy: {describe_installation('sql')}"
