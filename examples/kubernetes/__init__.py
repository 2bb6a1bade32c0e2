"""Kubernetes: renders manifests from a cluster description, for who has a Kubernetes in the place of a Controller.

Begin with `manifests.py`, which makes them; `__main__.py` is the command. JSON is YAML, too, so kubectl takes it:

    python -m celery5.examples.kubernetes cluster.toml --app shop --image registry/shop:1 | kubectl apply -f -
"""
