"""How a project tests what it sends: `manage.py test celery5.examples.django_shop`. None of these needs a broker."""

from django.core.exceptions import ObjectDoesNotExist
from django.test import TestCase, TransactionTestCase

from celery5.contrib.django import get_app
from celery5.examples.django_shop.models import Order
from celery5.examples.django_shop.tasks import count_orders, send_receipt
from celery5.testing import in_memory, recorded, running_worker


class PlacingOrders(TestCase):
    """What a view sends, and what its jobs do, inside of the transaction of the test, which is rolled back."""

    def test_an_order_sends_its_receipt_after_the_commit(self) -> None:
        with recorded(get_app()) as sent:
            with self.captureOnCommitCallbacks(execute=True):
                order = self.client.post("/orders/", {"customer": "ada"}).json()["order"]
                assert sent.jobs == []
            assert [job.arguments for job in sent.jobs_of(send_receipt)] == [{"order": order}]

    def test_a_receipt_is_written_into_the_order(self) -> None:
        with recorded(get_app()) as sent:
            with self.captureOnCommitCallbacks(execute=True):
                order = self.client.post("/orders/", {"customer": "bob"}).json()["order"]
            assert sent.run() == ["receipt for bob"]
        assert Order.objects.get(pk=order).receipt == "receipt for bob"

    def test_a_worker_in_this_test_writes_the_receipt_in_its_transaction(self) -> None:
        with in_memory(get_app()) as jobs:
            with self.captureOnCommitCallbacks(execute=True):
                order = self.client.post("/orders/", {"customer": "eve"}).json()["order"]
            jobs.run()
            jobs.assert_ran(send_receipt, order, attempts=1)
        assert Order.objects.get(pk=order).receipt == "receipt for eve"

    def test_a_receipt_of_no_order_fails_the_test_as_it_is(self) -> None:
        with in_memory(get_app()) as jobs:
            send_receipt.options(max_retries=2).delay(404)
            with self.assertRaises(ObjectDoesNotExist):  # noqa: PT027  this is no test of pytest
                jobs.run()
            jobs.assert_ran(send_receipt, 404, attempts=3)

    def test_a_refused_order_sends_nothing(self) -> None:
        with recorded(get_app()) as sent, self.captureOnCommitCallbacks(execute=True):
            answer = self.client.post("/orders/", {"customer": "cleo", "card": "refused"})
        assert (answer.status_code, sent.jobs) == (402, [])


class Working(TransactionTestCase):
    """What a worker does, which has connections of its own and so needs transactions that are really committed."""

    def test_a_worker_writes_the_receipt(self) -> None:
        with running_worker(get_app()):
            order = self.client.post("/orders/", {"customer": "dan"}).json()["order"]
            assert send_receipt.delay(order).get() == "receipt for dan"
            assert count_orders.delay().get() == 1
        assert Order.objects.get(pk=order).receipt == "receipt for dan"
