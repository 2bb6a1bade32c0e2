"""Run boxed tasks in shell, in JavaScript and in Python, each job in its own process.

celery5 -A celery5.examples.boxes.tasks worker start
"""
