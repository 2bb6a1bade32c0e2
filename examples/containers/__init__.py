"""Run celery5 in containers: an image from the repository's wheel, and a cluster of it for Docker Compose.

`Dockerfile` makes the image, `compose.yaml` starts a server, a Controller with its members, and the dashboard, and
`cluster.toml` describes the members. In a checkout of the repository:

    docker compose --file examples/containers/compose.yaml up --build
"""
