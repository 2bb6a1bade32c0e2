"""Define every setting of an application, and find out where its value comes from."""
