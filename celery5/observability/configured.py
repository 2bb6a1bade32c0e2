"""The middleware that settings ask for."""

from celery5.config.settings import Settings
from celery5.observability.middleware import Middleware


def make_configured_middleware(settings: Settings) -> list[Middleware]:
    """Return the middleware that settings ask for, which is outside of the application's own.

    Raises:
        Misconfigured: A package that it needs is not installed.
    """
    middleware: list[Middleware] = []
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
