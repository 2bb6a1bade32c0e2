# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from types import ModuleType
from typing import Any, ClassVar

class AppConfig:
    name: ClassVar[str]
    label: ClassVar[str]
    verbose_name: ClassVar[str]
    default_auto_field: ClassVar[str]
    module: ModuleType
    path: str
    def __init__(self, app_name: str, app_module: ModuleType) -> None: ...
    def ready(self) -> None: ...

apps: Any
