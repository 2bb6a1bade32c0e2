"""Subject packages: where the names are that `celery5` itself does not offer."""

import pytest


def test_a_name_of_a_subject_is_refused_with_its_package() -> None:
    with pytest.raises(ImportError, match=r"from celery5\.limits import Range"):
        exec("from celery5 import Range")


def test_a_name_that_nobody_offers_is_refused_as_python_does() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Rangoon'"):
        exec("from celery5 import Rangoon")
