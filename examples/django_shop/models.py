"""What the database has."""

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    customer = models.TextField()
    receipt = models.TextField(default="")
