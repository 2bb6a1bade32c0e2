"""Render Kubernetes manifests from a cluster description, for clusters without a Controller.

`manifests.py` makes them; `__main__.py` is the command. JSON is also YAML, so kubectl takes it:

    python -m celery5.examples.kubernetes cluster.toml --app shop --image registry/shop:1 | kubectl apply -f -
"""
