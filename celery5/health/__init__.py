"""Health: checks of a worker and of what its tasks need, and the circuit breakers that they open."""

from typing import TYPE_CHECKING

from celery5.lazy import exports
from celery5.lazy_modules import load_lazily

if TYPE_CHECKING:
    from celery5.health.health_check import HealthCheck
    from celery5.protocol.health.breaker import BreakerPolicy

__all__ = ["BreakerPolicy", "HealthCheck"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {"BreakerPolicy": "celery5.protocol.health.breaker", "HealthCheck": "celery5.health.health_check"},
    )

load_lazily(__name__, "http_requests")
