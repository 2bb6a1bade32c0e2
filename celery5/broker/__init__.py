"""Broker: the one layer that knows Redis: keys, calls, Lua scripts, and connections of three colours."""

from celery5.lazy_modules import load_lazily

load_lazily(__name__, "ambient_asyncio", "ambient_trio")
