# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from collections.abc import Mapping, Sequence
from typing import Any

class BaseTaskBackend:
    alias: str
    options: dict[str, Any]
    task_class: type[Any]
    supports_defer: bool
    supports_async_task: bool
    supports_get_result: bool
    supports_priority: bool
    def validate_task(self, task: Any) -> None: ...
    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...
    def get_result(self, result_id: str) -> Any: ...
    def check(self, **kwargs: Any) -> Any: ...
