"""Bulk actions: many jobs or runs replayed, purged, revoked or retried by a filter, without a caller that waits."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.bulk.actions import Bulk, BulkCount
    from celery5.protocol.bulk import BulkProgress, BulkRequest, BulkStatus

__all__ = ["Bulk", "BulkCount", "BulkProgress", "BulkRequest", "BulkStatus"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "BulkRequest": "celery5.protocol.bulk",
            "Bulk": "celery5.bulk.actions",
            "BulkCount": "celery5.bulk.actions",
            "BulkProgress": "celery5.protocol.bulk",
            "BulkStatus": "celery5.protocol.bulk",
        },
    )
