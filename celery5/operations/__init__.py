"""What a person or a program may do with an application: each operation is defined once, for every surface."""
