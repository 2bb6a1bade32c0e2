"""The kinds of tasks: where their code runs."""

from typing import Literal

TaskKind = Literal["trio", "asyncio", "thread", "boxed"]
"""In the worker's Trio loop, in its asyncio loop, in a thread, or in its own process."""
TASK_KINDS = ("trio", "asyncio", "thread", "boxed")
IO_KINDS = ("trio", "asyncio")
"""The kinds that are I/O-bound: more of their jobs may wait at once on the same processor."""
