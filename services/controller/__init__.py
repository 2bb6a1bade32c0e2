"""The services of a Controller, which runs the members of a cluster."""
