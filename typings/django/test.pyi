# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

import unittest
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

class SimpleTestCase(unittest.TestCase):
    client: Any

class TransactionTestCase(SimpleTestCase): ...

class TestCase(TransactionTestCase):
    @classmethod
    def captureOnCommitCallbacks(
        cls, *, using: str = ..., execute: bool = ...
    ) -> AbstractContextManager[list[Callable[[], object]]]: ...

def __getattr__(name: str) -> Any: ...
