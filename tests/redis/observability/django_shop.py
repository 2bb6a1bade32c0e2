"""A project with Django's databases, whose worker the tests of connections start."""

import os
import threading
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.conf import settings

if not settings.configured:
    engine = os.environ.get("DJANGO_ENGINE", "django.db.backends.sqlite3")
    database = {"ENGINE": engine, "NAME": os.environ["DJANGO_DB"], "CONN_MAX_AGE": None}
    if engine.endswith("postgresql"):
        database |= {"HOST": os.environ["DJANGO_HOST"], "USER": "postgres"}
    databases: dict[str, dict[str, Any]] = {
        "default": database,
        "checked": {**database, "CONN_HEALTH_CHECKS": True},
        "short": {**database, "CONN_MAX_AGE": 0},
    }
    if engine.endswith("postgresql"):
        databases["short"]["OPTIONS"] = {"application_name": "short"}
    settings.configure(DATABASES=databases, INSTALLED_APPS=[], DEBUG=True)
    django.setup()

from django.db import connection, connections, transaction

from celery5 import App

app = App(os.environ["DJANGO_APP"], cpu_slots=1, box_slots=1, retry_policy={"max_retries": 0})
orders = app.stream("orders", partitions=1)


def query(alias: str = "default") -> int:
    """Ask a database."""
    with connections[alias].cursor() as cursor:
        cursor.execute("select 7")
        return int(cursor.fetchone()[0])


def break_connection(alias: str = "default") -> None:
    """Do what a restart of the database does, or its limit for idle connections."""
    connection = connections[alias]
    connection.ensure_connection()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            pid = cursor.fetchone()[0]
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute("select pg_terminate_backend(%s)", [pid])
        other.close()
    else:
        connection.connection.close()


def leave_transaction() -> None:
    """Leave a transaction open, as an error in the middle of the end of a block does."""
    transaction.atomic().__enter__()


def count_short() -> int:
    """Return how many connections there are, of all processes, that are not to stay open."""
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where application_name = 'short'")
        return int(cursor.fetchone()[0])


def describe() -> tuple[int, bool, int]:
    """Queries that are remembered, whether there is an open transaction, and the thread."""
    return len(connection.queries_log), connection.in_atomic_block, threading.get_ident()


ACTIONS: dict[str, Any] = {
    "query": query,
    "break": break_connection,
    "leave": leave_transaction,
    "describe": describe,
    "query checked": lambda: query("checked"),
    "break checked": lambda: break_connection("checked"),
    "query short": lambda: query("short"),
    "count short": count_short,
}


@app.task(name="thread")
def in_thread(action: str) -> Any:
    return ACTIONS[action]()


@app.task(name="boxed", boxed=True)
def in_box(action: str) -> Any:
    return ACTIONS[action]()


@app.task(name="asyncio", loop="asyncio")
async def in_asyncio(action: str) -> Any:
    return await sync_to_async(ACTIONS[action])()


@app.task(name="trio")
async def in_trio(action: str) -> Any:
    return ACTIONS[action]()


@app.task(name="asyncio-again", loop="asyncio")
async def twice() -> list[Any]:
    """Two queries of one job, which are made in one thread."""
    return [await sync_to_async(describe)(), await sync_to_async(describe)()]


@app.processor(orders, then="ignore")
def look_up(events: Any) -> None:
    for order in events.records():
        if order["n"] == 0:
            break_connection()
        query()
