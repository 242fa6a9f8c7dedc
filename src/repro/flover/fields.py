"""What a user gives, checked by one rule and kept as plain Python: each message names the field, what was found and what
is allowed."""

import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Set
from numbers import Real
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


class RequestError(ValueError):
    """A request that cannot be served: too long for a slot, the pool or `kv_tokens`, a token outside the vocabulary, an
    id that is still in use, or a field of the wrong type or out of range."""


def number(
    kind: type[Number],
    name: str,
    value: object,
    allowed: str,
    holds: Callable[[Number], bool] = lambda _: True,
    error: type[ValueError] = RequestError,
) -> Number:
    """`value` as an int or a float, also where numpy or torch holds it. Raises `error` for what is no number (a bool is
    none), or where `holds` is false of it; `allowed` says in the message what would do."""
    try:
        plain = _plain(value)
        if not isinstance(plain, bool):
            found = kind(operator.index(plain) if kind is int else _real(plain))
            if holds(found):
                return found
    except Exception:  # TypeError and OverflowError, and whatever a class of the user's raises
        pass
    raise error(f"{name} is {shown(value)}, must be {allowed}")


def whole_numbers(name: str, values: object, *, ordered: bool) -> tuple[int, ...]:
    """The whole numbers in a tuple, list or array (or a set, unless `ordered`), as a tuple of ints. RequestError for
    another kind of collection, and for an entry that is no whole number."""
    refused = (str, bytes, bytearray, Mapping, *((Set,) if ordered else ()))
    if isinstance(values, Collection) and not isinstance(values, refused):
        try:
            found: tuple[Any, ...] = tuple(_plain(values))
        except Exception:  # a tensor without dimensions, or whatever a class of the user's raises
            found = (None,)
        if set(map(type, found)) <= {int}:
            return found
        return tuple(number(int, f"{name}[{at}]", value, "a whole number") for at, value in enumerate(found))
    raise RequestError(f"{name} is {shown(values)}, must be {'a sequence' if ordered else 'a set'} of whole numbers")


def _plain(value: Any) -> Any:
    """What numpy and torch hold, as Python's own numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _real(value: object) -> float:
    if not isinstance(value, Real):  # float() would read text
        raise TypeError
    return float(value)


def shown(value: object) -> str:
    """Short, whatever it is: a number of many digits cannot be written, and a class may refuse."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
