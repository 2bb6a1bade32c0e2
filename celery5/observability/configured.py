"""The middleware that settings, or the frameworks of the process, ask for."""

from collections.abc import Iterable

from celery5.config.settings import Settings
from celery5.middleware.django_connections import DjangoConnections, is_django_configured
from celery5.middleware.middleware import Middleware


def lacks_middleware(stack: Iterable[Middleware]) -> bool:
    """Return whether Django was configured after that middleware was made."""
    return is_django_configured() and not any(
        isinstance(middleware, DjangoConnections) for middleware in stack
    )


def make_configured_middleware(settings: Settings) -> list[Middleware]:
    """Return the middleware that settings ask for, and that of Django where Django is configured.

    It is outside of the application's own.

    Raises:
        Misconfigured: A package that it needs is not installed.
    """
    middleware: list[Middleware] = [DjangoConnections()] if is_django_configured() else []
    if settings.opentelemetry != "off":
        from celery5.observability.opentelemetry import OpenTelemetryMiddleware

        middleware.append(
            OpenTelemetryMiddleware(
                traces=settings.opentelemetry in ("traces", "all"),
                metrics=settings.opentelemetry in ("metrics", "all"),
                relation=settings.trace_relation,
            )
        )
    if settings.sentry:
        from celery5.observability.sentry import SentryMiddleware

        middleware.append(SentryMiddleware())
    return middleware
