"""Which view answers which address."""

from django.urls import path

from celery5.examples.django_shop.views import place_order, show_order

urlpatterns = [path("orders/", place_order), path("orders/<int:order>/", show_order)]
