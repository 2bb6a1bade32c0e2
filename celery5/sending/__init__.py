"""Send jobs and events from an application to its brokers."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.protocol.job.retry_policy import UnpublishableRetry

__all__ = ["UnpublishableRetry"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, {"UnpublishableRetry": "celery5.protocol.job.retry_policy"})
