"""Functions compiled by numba. They are kept on disk where numba finds a folder that can be written (`NUMBA_CACHE_DIR`, beside
the source, the user's cache folder); where there is none, as in a container, each process compiles its own."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `numba.njit` with these options, and with the cache where that is possible."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):  # numba's words for no folder
                raise
            return njit(**options)(function)

    return decorate
