"""Runners: where user code runs. They know no Redis and no queue: they take a function and return an outcome."""

from celery5.lazy_modules import load_lazily

load_lazily(__name__, "asyncio_thread", "jobs_loop")
