"""Start an application with all kinds of processes from a cluster description, by a Controller.

Begin with `cluster.toml`, the description, and go on to `kiosk.py`, the application. By hand, on a Redis of your own,
in this folder:

    celery5 -A celery5.examples.cluster.kiosk controller start --log-format console
    celery5 -A celery5.examples.cluster.kiosk controller status
"""
