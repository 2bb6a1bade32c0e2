"""Say which file the application was loaded from, so that people see which version of the code runs."""

import os

from celery5.app import App
from celery5.middleware.django_connections import SETTINGS_VARIABLE
from celery5.protocol.names import get_module_file


def find_code_file(app: App) -> str:
    """Return the file of the application's module; of a Django project that declares none, the file of its settings.

    It is "" where there is no file.
    """
    is_ours = app.module.startswith("celery5.contrib.django.")
    return get_module_file(os.environ.get(SETTINGS_VARIABLE, "") if is_ours else app.module)
