"""The connections of an application to its brokers."""
