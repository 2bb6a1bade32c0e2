"""The audit trail: who has done what, from where, and what came of it."""

from typing import TYPE_CHECKING

from celery5.lazy import exports

if TYPE_CHECKING:
    from celery5.audit.trail import Audit
    from celery5.protocol.audit import AuditEntry

__all__ = ["Audit", "AuditEntry"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "Audit": "celery5.audit.trail",
            "AuditEntry": "celery5.protocol.audit",
        },
    )
