# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from typing import Any, ClassVar

class Model:
    objects: ClassVar[Any]
    pk: Any
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def save(self, *args: Any, **kwargs: Any) -> None: ...

def __getattr__(name: str) -> Any: ...
