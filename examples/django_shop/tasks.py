"""The tasks of the project. A worker finds them, since the app is in INSTALLED_APPS."""

from celery5 import task
from celery5.examples.django_shop.models import Order


@task
def send_receipt(order: int) -> str:
    """Write the receipt of an order: a `def` task uses the ORM as a view does."""
    found = Order.objects.get(pk=order)
    found.receipt = f"receipt for {found.customer}"
    found.save(update_fields=["receipt"])
    return str(found.receipt)


@task(loop="asyncio")
async def count_orders() -> int:
    """Count the orders, with the asynchronous methods of the ORM: they need asyncio."""
    return int(await Order.objects.acount())
