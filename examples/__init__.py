"""Show celery5 at work in small applications; the tests run all of them.

They are part of the wheel, so that `celery5 demo` works wherever celery5 is installed (decision record 0004).
"""
