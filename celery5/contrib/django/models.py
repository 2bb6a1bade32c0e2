"""The permissions of the dashboard. There is no table: Django keeps permissions with a model."""

from typing import ClassVar

from django.db import models


class DashboardAccess(models.Model):
    """What a member of the staff may do in the dashboard."""

    class Meta:
        """How Django takes it: nothing in the database but its permissions."""

        managed: ClassVar[bool] = False
        default_permissions: ClassVar[tuple[str, ...]] = ()
        permissions: ClassVar[list[tuple[str, str]]] = [
            ("view_dashboard", "Can see the dashboard (role viewer)"),
            ("operate_dashboard", "Can act on jobs and queues (role operator)"),
            ("administer_dashboard", "Can do everything in the dashboard (role admin)"),
        ]
        verbose_name: ClassVar[str] = "dashboard"
        verbose_name_plural: ClassVar[str] = "dashboard"
