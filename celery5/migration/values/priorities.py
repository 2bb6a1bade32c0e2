"""Translate a priority of Celery, a number whose meaning depends on the broker, into one of celery5's three."""

import ast
import re
from typing import Literal

Transport = Literal["redis", "amqp", ""]
"""The broker of a Celery project; '' if its files do not name one."""
_URL = re.compile(
    r"(?i)(?:broker|celery)[^\n]*?[\"'=\s(,](?P<scheme>redis|rediss|sentinel|valkey|amqps?|pyamqp|rabbitmq)"
    r"(?:\+\w+)?://"
)
MAX_LINE = 2000
_ORDER = {
    "redis": "on Redis, Celery takes 0 first and 9 last, and a job without a priority as 0",
    "amqp": "on RabbitMQ, Celery takes the highest number first, and a job without a priority as 0",
    "": "Celery takes 0 first on Redis, and 9 first on RabbitMQ",
}
_LEVELS = 'celery5 has "high", "normal", which is the default, and "low" (celery5 docs priorities)'


def find_transport(text: str) -> Transport:
    """Return the broker that a file names in a URL; '' for none."""
    lines = text.split("\n") if "://" in text else []
    matches = [match for line in lines if len(line) <= MAX_LINE and (match := _URL.search(line))]
    found = {"amqp" if "mq" in match["scheme"].lower() else "redis" for match in matches}
    return "amqp" if "amqp" in found else "redis" if found else ""


def describe_priority(value: ast.expr, transport: Transport) -> tuple[str, str]:
    """Return a priority as the list of changes shows it, and what to write in its place."""
    number = value.value if isinstance(value, ast.Constant) else None
    if not isinstance(number, int) or isinstance(number, bool) or not transport:
        return "priority", f'priority="high", "normal" or "low": {_ORDER[transport]}'
    late = number if transport == "redis" else 9 - number
    level = "high" if late < FIRST_NORMAL else "normal" if late < FIRST_LOW else "low"
    return f"priority={number}", f'priority="{level}": {_ORDER[transport]}; {_LEVELS}'


FIRST_NORMAL, FIRST_LOW = 3, 6
"""The lowest numbers of "normal" and "low". Celery on Redis has four levels, which begin at 0, 3, 6 and 9."""
