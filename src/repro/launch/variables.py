"""Numbers in the environment, where torchrun, Slurm and users put them."""

import os


def number(name: str, least: int, most: int | None = None) -> int:
    """Value of the environment variable `name`, which is set. ValueError with what was found and what is allowed."""
    found = os.environ[name]
    if found.isascii() and found.isdigit() and len(found) < 20:
        value = int(found)
        if least <= value and (most is None or value <= most):
            return value
    allowed = f"{least} or more" if most is None else f"{least} to {most}" if most > least else f"{least}"
    raise ValueError(f"the environment variable {name} is {found!r}, allowed: {allowed}")
