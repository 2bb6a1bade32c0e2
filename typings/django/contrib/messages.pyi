# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from typing import Any

def __getattr__(name: str) -> Any: ...
