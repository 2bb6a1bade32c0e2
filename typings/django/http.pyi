# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from typing import Any

class HttpRequest:
    POST: Any
    user: Any

class HttpResponse:
    def __init__(self, content: object = ..., *, status: int = ...) -> None: ...

class JsonResponse(HttpResponse): ...

def __getattr__(name: str) -> Any: ...
