"""The services of a Publisher, which accepts jobs from producers and publishes them."""
