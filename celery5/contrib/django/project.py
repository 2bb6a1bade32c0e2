"""The application of a Django project that declares none. `-A celery5.contrib.django.project` names it."""

from celery5.app import App
from celery5.contrib.django.project_settings import get_application_name

app: App = App(get_application_name())
