"""Free tasks: declared with no application; whoever includes this module owns them."""

from celery5 import task


@task
async def charge(order: int) -> str:
    """Charge an order."""
    return f"charged {order}"


@task(queue="mail", max_retries=1)
def remind(name: str = "you") -> str:
    """Remind somebody."""
    return f"dear {name}"
