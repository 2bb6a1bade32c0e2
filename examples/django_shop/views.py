"""The pages of the project, in JSON."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_POST

from celery5.examples.django_shop.models import Order
from celery5.examples.django_shop.tasks import send_receipt


@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Take an order. Its receipt is a job, sent when the order is in the database, and not sent when it is refused."""
    with transaction.atomic():
        order = Order.objects.create(customer=request.POST["customer"])
        send_receipt.delay_on_commit(order.pk)
        if request.POST.get("card") == "refused":
            transaction.set_rollback(True)
            return JsonResponse({"error": "the card was refused"}, status=402)
    return JsonResponse({"order": order.pk}, status=201)


def show_order(_request: HttpRequest, order: int) -> JsonResponse:
    """Show an order and its receipt, which is empty until the job has run."""
    found = get_object_or_404(Order, pk=order)
    return JsonResponse({"customer": found.customer, "receipt": found.receipt})
