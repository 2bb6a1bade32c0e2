"""Examples: small applications that show celery5 at work; the tests run every one of them.

They are part of the wheel, so that `celery5 demo` works wherever celery5 is installed (decision record 0004).
"""
