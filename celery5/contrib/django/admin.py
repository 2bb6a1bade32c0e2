"""The link to the dashboard in the index of Django's admin."""

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from celery5.contrib.django.asgi import get_role
from celery5.contrib.django.models import DashboardAccess
from celery5.contrib.django.project_settings import SETTING, read_project_settings


class DashboardLink(admin.ModelAdmin):
    """Leads from the admin to the dashboard, whose address is `CELERY5["dashboard_url"]`."""

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Redirect to the dashboard."""
        del extra_context
        url = read_project_settings().get("dashboard_url", "")
        if url:
            return redirect(str(url))
        messages.warning(request, f'Where is the dashboard? Write {SETTING} = {{"dashboard_url": "/jobs/"}}.')
        return redirect("admin:index")

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may use the dashboard."""
        return get_role(request.user) is not None

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may use the dashboard."""
        del obj
        return get_role(request.user) is not None

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: there is nothing to add."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is nothing to change."""
        del request, obj
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is nothing to delete."""
        del request, obj
        return False


admin.site.register(DashboardAccess, DashboardLink)
