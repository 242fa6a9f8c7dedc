"""YAML documents: as plain values, and as the models of our files.

Whoever wrote one: it is read in seconds and little memory, or refused with the file, the key and what is allowed. It is
made of texts, numbers, true, false, null, lists, and mappings with texts as keys; aliases and merges (`<<`) are known.
"""

import difflib
import functools
import math
import pickle
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from repro import files

Model = TypeVar("Model", bound=BaseModel)
_BYTES = 1 << 20  # of a file; the largest of ours has 70,000
_CHARACTERS = 1 << 22  # of a document with its aliases written out
_LEVELS = 30
_LINES = 20  # of a message
_DIGITS = 100  # of a number: base 60 takes the square of their count in time
_PREFIX = "tag:yaml.org,2002:"
_KINDS = frozenset(_PREFIX + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge"))
_PLAIN = "texts, numbers, true, false, null, lists and mappings; a text that looks like something else in quotes"
_Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C is ten times as fast


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message names file, key, what was found and what is allowed."""


def shown(value: object, most: int = 200) -> str:
    """`value` for a message, on one line and cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def text(path: Path) -> str:
    """A configuration file as it is written; ConfigError for what is no ordinary file, is too long or not UTF-8."""
    try:
        data = files.read(path, _BYTES)
    except OSError as error:
        reason = f"{path}: cannot be read: {error.strerror}; allowed: an ordinary file"
        raise ConfigError(reason if error.strerror else str(error)) from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: not UTF-8: {error}") from error


def parse(text: str, where: str) -> Any:
    """The values of a YAML document; ConfigError with the place in it, which begins with `where`."""
    try:
        return pickle.loads(_pickled(text, where))
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{where}: found too many levels; allowed: {_LEVELS}") from error
    # Beside its own errors PyYAML lets out whatever a tag meets in a value that does not fit it.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error)[:500]}") from error


@functools.lru_cache(maxsize=32)
def _pickled(text: str, where: str) -> bytes:
    """The values, kept: a page or a notebook asks for the same few files a hundred times. Each gets its own."""
    return pickle.dumps(_Document(text, where).values())


def _told(node: yaml.Node) -> str:
    value = shown(node.value) if isinstance(node, yaml.ScalarNode) else f"a {node.id}"
    return f"{value}, read as {node.tag.removeprefix(_PREFIX)[:40]!r}"


class _Loader(yaml.composer.Composer, _Safe):
    """Composes nodes in Python: the composer in C overflows its stack where lists are nested deeply enough."""

    def __init__(self, text: str) -> None:
        _Safe.__init__(self, text)
        yaml.composer.Composer.__init__(self)


class _Document:
    """A document is composed to nodes, in which an alias is the node that it names; these are looked through before
    anything is made of them."""

    def __init__(self, text: str, where: str) -> None:
        self.loader, self.where = _Loader(text), where
        self.sizes: dict[yaml.Node, tuple[int, int]] = {}

    def values(self) -> Any:
        node = self.loader.get_single_node()
        if node is None:
            return None
        self._measure(node, ())
        return self.loader.construct_document(node)

    def _measure(self, node: yaml.Node, keys: tuple[str, ...]) -> tuple[int, int]:
        """Characters and levels of a node with its aliases written out; ConfigError for what is not allowed in it."""
        if node in self.sizes:
            return self.sizes[node]
        if len(keys) > _LEVELS:
            self._refuse(keys, "too many levels", f"{_LEVELS}")
        if node.tag not in _KINDS:
            self._refuse(keys, _told(node), _PLAIN)
        self.sizes[node] = (_CHARACTERS + 1, 1)  # should it hold itself
        if isinstance(node, yaml.ScalarNode):
            self._check_number(node, keys)
            parts = [(len(node.value) + 1, 0)]
        elif isinstance(node, yaml.MappingNode):
            names = self._names(node, keys)
            parts = [self._measure(value, (*keys, name)) for name, (_, value) in zip(names, node.value, strict=True)]
            parts += [(len(key.value) + 1, 0) for key, _ in node.value]
        else:
            parts = [self._measure(value, (*keys, str(number))) for number, value in enumerate(node.value)]
        characters = 1 + sum(characters for characters, _ in parts)
        levels = 1 + max((levels for _, levels in parts), default=0)
        if characters > _CHARACTERS:
            self._refuse(keys, "aliases that stand for too much, or for themselves", f"{_CHARACTERS:,} characters")
        if levels > _LEVELS:
            self._refuse(keys, "too many levels", f"{_LEVELS}")
        self.sizes[node] = characters, levels
        return characters, levels

    def _names(self, node: yaml.MappingNode, keys: tuple[str, ...]) -> list[str]:
        """The keys of a mapping. One that is given twice is refused: the second would silently win."""
        found = set()
        for key, _ in node.value:
            if key.tag == f"{_PREFIX}merge":
                continue  # what it brings may be given again
            if key.tag != f"{_PREFIX}str" or not isinstance(key, yaml.ScalarNode):
                self._refuse(keys, f"the key {_told(key)}", "texts as keys, in quotes if they look like something else")
            if key.value in found:
                self._refuse(keys, f"key given twice: {key.value[:200]}", "each key once")
            found.add(key.value)
        return [key.value[:40] if key.value.isprintable() else shown(key.value, 40) for key, _ in node.value]

    def _check_number(self, node: yaml.ScalarNode, keys: tuple[str, ...]) -> None:
        if node.tag not in (f"{_PREFIX}int", f"{_PREFIX}float"):
            return
        try:
            value = self.loader.construct_object(node) if len(node.value) <= _DIGITS else math.inf
        except (ValueError, LookupError):  # by its tag alone
            value = math.nan
        if not (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)):
            self._refuse(keys, shown(node.value), "finite numbers, whole ones of 64 bits")

    def _refuse(self, keys: tuple[str, ...], found: str, allowed: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {'.'.join(keys) or 'the document'}: found {found}; allowed: {allowed}")


# --- as the files of the project -------------------------------------------------------------------------------------


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _allowed_values(annotation: Any) -> str:
    if _is_model(annotation):
        return f"a mapping with keys {', '.join(annotation.model_fields)}"
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_allowed_values(part) for part in get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def _allowed(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Known keys, or allowed values, at the place in `model` that a pydantic error points to."""
    here: Any = model
    for number, step in enumerate(location):
        if location[number + 1 :] == ("[key]",) and get_origin(here) is dict:  # the key of a mapping, not its value
            return f"allowed keys: {_allowed_values(get_args(here)[0])}"
        if get_origin(here) in (Union, types.UnionType):  # an optional section: look inside it
            here = next(filter(_is_model, get_args(here)), here)
        if _is_model(here):
            if step not in here.model_fields:
                near = difflib.get_close_matches(str(step), here.model_fields, n=1)
                return f"known keys: {', '.join(here.model_fields)}" + (f"; nearest: {near[0]}" if near else "")
            here = here.model_fields[str(step)].annotation
        elif get_origin(here) in (dict, list):
            here = get_args(here)[-1]
    return f"allowed: {_allowed_values(here)}"


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A pydantic error in one line each: place, key, what was found, what is allowed."""
    lines = []
    for item in error.errors(include_url=False)[:_LINES]:
        key = ".".join(map(str, item["loc"]))[:200] or "the document"
        said = item["msg"].removeprefix("Value error, ")  # pydantic's words before ours
        of_keys = isinstance(item["input"], dict)
        if not (of_keys and item["type"] == "value_error"):  # a rule of ours on several keys says it all itself
            value = "a mapping" if of_keys else shown(item["input"])
            said += ("" if item["type"] == "missing" else f", found {value}") + f"; {_allowed(model, item['loc'])}"
        lines.append(f"{where}: {key}: {said}")
    if more := error.error_count() - len(lines):
        lines.append(f"{where}: and {more} more")
    return "\n".join(lines)


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Read and check one YAML file; ConfigError for a missing file, bad YAML, unknown keys, wrong types."""
    values = parse(text(path), str(path))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, str(path))) from error
