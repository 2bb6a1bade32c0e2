"""The settings of the project."""

import os
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
SECRET_KEY = os.environ.get("SHOP_SECRET", "only for this example")
ROOT_URLCONF = "celery5.examples.django_shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "celery5.contrib.django",
    "celery5.examples.django_shop",
]

CELERY5 = {
    "name": os.environ.get("SHOP_NAME", "django_shop"),
    "grace_period": 20,
    "results_ttl": 600,
}


def read_database(url: str) -> dict[str, Any]:
    """Return the entry of DATABASES for a URL such as postgres://shop:secret@localhost/shop; SQLite for none."""
    if not url:
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("SHOP_DATABASE", "shop.db")}
    parts = urlsplit(url)
    host = parse_qs(parts.query).get("host", [""])[0]  # the folder of a unix socket
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.strip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": host or parts.hostname or "",
        "PORT": parts.port or "",
        "CONN_MAX_AGE": 600,
        "CONN_HEALTH_CHECKS": True,
    }


DATABASES = {"default": read_database(os.environ.get("DATABASE_URL", ""))}
