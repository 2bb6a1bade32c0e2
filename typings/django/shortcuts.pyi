# Django: as much of its interface as celery5 and its tests use; the library has no type information of its own.

from typing import Any

from django.http import HttpResponse

def redirect(to: str, *args: Any, **kwargs: Any) -> HttpResponse: ...
def __getattr__(name: str) -> Any: ...
