"""Describe how to install the packages of an extra.

No package index has celery5 yet, so `pip install 'celery5[top]'` fails. The packages of its extras are on PyPI. So a
hint names these packages, which are read from the metadata of the installed celery5.
"""

import re
import shlex

_OWN_EXTRA = re.compile(r"celery5\[([\w-]+)\]")


def get_packages(extra: str) -> list[str]:
    """Return the requirements of an extra, such as `rich>=13.9`, without those on celery5 itself; [] if not known."""
    from importlib.metadata import PackageNotFoundError, requires  # only where something is missing

    try:
        lines = requires("celery5") or []
    except PackageNotFoundError:  # the code is on the import path, and not installed
        return []
    packages: list[str] = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        if re.search(rf"""\bextra == ["']{extra}["']""", condition):
            own = _OWN_EXTRA.match(requirement.strip())
            packages += get_packages(own[1]) if own else [requirement.strip()]
    return packages


def describe_installation(extra: str) -> str:
    """Return the command that installs the packages of an extra, and the name of the extra, for an error or a hint."""
    packages = get_packages(extra)
    if not packages:
        return f"install celery5 with the extra {extra}: pip install '.[{extra}]' in its checkout"
    return f"pip install {shlex.join(packages)} (the extra celery5[{extra}])"
