# Lupa: as much of its interface as celery5 uses; the library has no type information of its own.
