"""The dashboard in a Django project: mounted with Django's users and permissions, and linked in the admin."""

from pathlib import Path

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.django.projects import Project

SETTINGS = """
SECRET_KEY = "of a test"
USE_TZ = True
ALLOWED_HOSTS = ["shop.example", ".wild.example"]
ROOT_URLCONF = "shop.urls"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db"}}
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
    "django.contrib.messages", "celery5.contrib.django",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
CELERY5 = {"dashboard_url": "/jobs/"}
"""
URLS = """
from django.contrib import admin
from django.http import HttpResponse
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls), path("", lambda request: HttpResponse("the shop"))]
"""
USERS = """
from django.contrib.auth.models import Permission, User
for name in ("view", "operate", "administer"):
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename=f"{name}_dashboard"))
User.objects.create_superuser("root")
User.objects.create_user("staff", is_staff=True)
guest = User.objects.create_user("guest")
guest.user_permissions.set(Permission.objects.filter(content_type__app_label="celery5"))
"""
START = """
import asyncio, re
import httpx
from django.conf import settings
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.test import Client
from celery5.contrib.django.asgi import with_dashboard

settings.ALLOWED_HOSTS.append("testserver")
site = with_dashboard(get_asgi_application())

def sign_in(name):
    client = Client()
    client.force_login(User.objects.get(username=name))
    return {settings.SESSION_COOKIE_NAME: client.cookies[settings.SESSION_COOKIE_NAME].value}

def ask(path, name="", host="shop.example", method="GET", **more):
    cookies = sign_in(name) if name else {}
    async def send():
        transport = httpx.ASGITransport(app=site)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}", cookies=cookies) as client:
            return await client.request(method, path, **more)
    return asyncio.run(send())
"""


@pytest.fixture
def project(tmp_path: Path, own_server: EmbeddedServer) -> Project:
    project = Project(tmp_path, CELERY5_BROKER=own_server.url)
    project.write("shop/settings.py", SETTINGS)
    project.write("shop/urls.py", URLS)
    migrated = project.manage("migrate")
    assert migrated.code == 0, migrated.err
    project.run(USERS)
    return project


ROLES = """
def act(name, path):
    page = ask("/jobs/shop/limits", name)
    key = re.search(r'name="form_key" value="([^"]+)"', page.text)
    headers = {"X-Form-Key": key[1] if key else ""}
    answer = ask(path, name, method="POST", headers=headers, json={"task": "t", "why": "a test", "queue": "default"})
    return page.status_code, answer.status_code != 403

for name in ("view", "operate", "administer", "root"):
    print(name, act(name, "/jobs/api/v1/shop/task/suspend"), act(name, "/jobs/api/v1/shop/queue/purge"))
for name in ("staff", "guest"):
    refused = ask("/jobs/shop/limits", name)
    print(name, refused.status_code, refused.text.strip())
"""


def test_permissions_of_django_are_roles_of_the_dashboard(project: Project) -> None:
    said = project.run(START + ROLES).splitlines()
    assert said == [
        "view (200, False) (200, False)",
        "operate (200, True) (200, False)",
        "administer (200, True) (200, True)",
        "root (200, True) (200, True)",
        "staff 403 staff is not staff with the permission celery5.view_dashboard",
        "guest 403 guest is not staff with the permission celery5.view_dashboard",
    ]


OTHERS = """
def show(answer):
    print(answer.status_code, answer.headers.get("location", "") or answer.text.strip()[:9])

show(ask("/"))
show(ask("/jobsite", "root"))
show(ask("/jobs/shop/limits"))
show(ask("/jobs/api/v1/shop/task/limits"))
show(ask("/jobs/", method="POST"))
show(ask("/jobs/", "root"))
show(ask("/jobs/shop/limits", "root", host="other.example"))
show(ask("/jobs/shop/limits", "root", host="a.wild.example"))
print(ask("/jobs/shop/limits", "root", headers={"cookie": f"{settings.SESSION_COOKIE_NAME}=forged"}).status_code)
"""


def test_others_are_sent_to_the_page_for_signing_in_and_the_project_answers_elsewhere(
    project: Project,
) -> None:
    assert project.run(START + OTHERS).splitlines() == [
        "200 the shop",
        "404 <!doctype",
        "302 /admin/login/?next=/jobs/shop/limits",
        "401 sign in t",
        "401 sign in t",
        "303 /jobs/shop",
        "400 this host",
        "421 this dash",
        "302",
    ]


ADMIN = """
from django.test import Client
for name in ("view", "staff"):
    client = Client()
    client.force_login(User.objects.get(username=name))
    index = client.get("/admin/").content.decode()
    link = client.get("/admin/celery5/dashboardaccess/")
    print(name, "/admin/celery5/dashboardaccess/" in index, link.status_code, link.headers.get("location"))
"""


def test_the_admin_has_a_link_for_those_who_may_use_the_dashboard(project: Project) -> None:
    said = project.run(START + ADMIN).splitlines()
    assert said[0] == "view True 302 /jobs/"
    assert said[1].startswith("staff False ")
    project.write("shop/settings.py", SETTINGS.replace("/jobs/", ""))
    assert project.run(START + ADMIN).splitlines()[0] == "view True 302 /admin/"
    assert project.manage("makemigrations", "--check", "--dry-run").code == 0
