"""Which code made a number: a hash of the definitions that an experiment can reach.

A definition is a top-level function, class or assignment. The hash takes each one that the experiment uses, directly or
through others, as syntax without comments, docstrings and the annotations of functions. It does not know where a
definition stands, by what import it is found, or in what order: moving code between files leaves the hash as it was.
Renaming a definition or changing it does not. Code for GPUs (modules that import Triton) has a hash of its own: of a
record made without a GPU it says nothing. Limits: what is found by a name made at run time is not followed, and of
two used definitions with the same name the hash does not tell which is called where.
"""

import ast
import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import paths
from repro.files import replacing

# Not in the source hash: how numbers are stored does not change them (SCHEMA_VERSION counts the changes that do).
STORAGE = ("repro.records", "repro.experiments.base")
_CODE_FILES = (".cpp", ".h", ".toml")  # part of the code when they stand beside a module
_SOURCE = Path(__file__).parents[1]

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, *_COMPREHENSIONS)
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Definition:
    """A top-level statement: names that it binds, a digest of its syntax, and dotted names in `repro` that it uses."""

    names: tuple[str, ...]
    digest: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A file: its definitions, what its names imported from `repro` stand for, and whether it needs a GPU."""

    definitions: tuple[Definition, ...]
    imports: dict[str, str]
    for_gpus: bool


def digest(*parts: bytes) -> str:
    """Short SHA-256 of `parts`."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def exists(module: str) -> bool:
    """Whether there is such a module or package."""
    return module in _files()


def source_hash(module: str) -> str:
    """Hash of all that a module defines and of every definition in `repro` that it uses, without those for GPUs. A
    package: all its modules."""
    return _hashes(module)[0]


def gpu_hash(module: str) -> str:
    """Hash of the definitions for GPUs that a module uses."""
    return _hashes(module)[1]


def _hashes(module: str) -> list[str]:
    kept = _kept()
    if module not in kept:
        kept[module] = _hashed(module)
        with contextlib.suppress(OSError), replacing(_store()) as temporary:
            temporary.write_text(json.dumps(kept))
    return kept[module]


def _hashed(module: str) -> list[str]:
    """The hash, and that of the code for GPUs."""
    roots = _inside_package(module)
    todo = [(name, definition) for name in roots for definition in _module(name).definitions]
    seen, imported = set[tuple[str, str]](), set(roots)
    while todo:
        place, definition = todo.pop()
        if (place, definition.digest) in seen:
            continue
        seen.add((place, definition.digest))
        for home, found in (each for name in definition.uses for each in _find(name)):
            todo.append((home, found))
            packages = itertools.accumulate(home.split("."), "{}.{}".format)  # the module and those above it
            for run in _files().keys() & set(packages) - imported:  # statements that act when a module is imported
                imported.add(run)
                todo += [(run, each) for each in _module(run).definitions if not each.names]
    texts = ({text.encode() for name, text in seen if _module(name).for_gpus is gpus} for gpus in (False, True))
    return [digest(*sorted(each)) for each in texts]


def _find(name: str) -> list[tuple[str, Definition]]:
    """What a dotted name stands for, with its module: one definition, or all of a module that is used as a value."""
    if name.startswith(STORAGE):
        return []
    if name in _files():
        return [(name, definition) for definition in _module(name).definitions]
    place, _, own = name.rpartition(".")
    if place not in _files():
        return []
    module = _module(place)
    found = [(place, definition) for definition in module.definitions if own in definition.names]
    return found or (_find(module.imports[own]) if own in module.imports else [])


# --- files ---------------------------------------------------------------------------------------------------------


def _sources(*suffixes: str) -> list[Path]:
    """The package's files of these kinds, sorted. Hidden files and folders, which editors, notebooks and macOS leave
    beside them, hold no code, and some are links to nothing."""
    found = (path for path in _SOURCE.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if "/." not in f"/{path.relative_to(_SOURCE).as_posix()}")


@functools.cache
def _files() -> dict[str, Path]:
    """Every module and package of `repro`. Python's own finder would import the packages above it, torch with them."""
    files = {path: path.relative_to(_SOURCE).with_suffix("").parts for path in _sources(".py")}
    return {".".join(("repro", *parts)).removesuffix(".__init__"): path for path, parts in files.items()}


def _inside_package(module: str) -> list[str]:
    """A module, and those below it where it is a package."""
    assert module in _files(), module
    return [name for name in _files() if f"{name}.".startswith(f"{module}.")]


@functools.cache
def _module(name: str) -> Module:
    file = _files()[name]
    return parse(file.read_text(), name, _code_files(file.parent))


@functools.cache
def _code_files(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.glob("[!.]*")) if path.suffix in _CODE_FILES)
    return {path.name: digest(path.read_bytes()) for path in files}


def _store() -> Path:
    return paths.root() / ".cache/source_hashes.json"


@functools.cache
def _kept() -> dict[str, Any]:
    """Hashes that this or an earlier process took of the same sources (parsing them takes a second), by module; beside
    them a digest of all sources. A file that cannot be used counts as not there."""
    files = _sources(".py", *_CODE_FILES)
    sources = digest(*(part for path in files for part in (str(path).encode(), path.read_bytes())))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        kept = json.loads(_store().read_text())
        if isinstance(kept, dict) and kept.get("sources") == sources:
            return kept
    return {"sources": sources}


# --- one file ------------------------------------------------------------------------------------------------------


def parse(text: str, name: str, code_files: Mapping[str, str]) -> Module:
    """Definitions and imports of the module `name` with source `text`. `code_files`: digests of the files in other
    languages beside it, by name; a definition that names one depends on it."""
    body = ast.parse(text).body
    body = [each for each in body if not isinstance(each, ast.If) or ast.unparse(each.test) != "TYPE_CHECKING"]
    bound = _bound(body)
    scope = {own: full or f"{name}.{own}" for own, full in bound.items()}
    definitions = []
    for statement in body:
        names = tuple(own for own, full in _bound([statement]).items() if full is None)
        if isinstance(statement, _IMPORTS) or _is_docstring(statement) or names == ("__all__",):
            continue
        writer = _Writer(code_files)
        code = writer.write(statement, scope)
        definitions.append(Definition(names, digest(code.encode()), tuple(sorted(writer.uses))))
    imports = {own: full for own, full in bound.items() if full is not None and full.startswith("repro.")}
    for_gpus = any(str(full).split(".")[0] == "triton" for full in bound.values())
    return Module(tuple(definitions), imports, for_gpus)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _within(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes at or below some, without the insides of the functions, classes and comprehensions among them."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            yield from _within(ast.iter_child_nodes(node))


def _bound(nodes: Iterable[ast.AST]) -> dict[str, str | None]:
    """Names that statements, or the parts of a function, bind: of an import what it stands for, of others None."""
    found: dict[str, str | None] = {}
    outer = set[str]()
    for node in _within(nodes):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names]
            found |= {own or full.split(".")[0]: full if own else full.split(".")[0] for full, own in names}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Global):
            outer |= set(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found[node.id] = None
        elif isinstance(node, ast.arg):
            found[node.arg] = None
        elif isinstance(node, _DEFINITIONS):
            found[node.name] = None
    return {name: full for name, full in found.items() if name not in outer}


class _Writer:
    """Writes a statement as text in which every name is what it stands for, and collects those of `repro`."""

    def __init__(self, code_files: Mapping[str, str]) -> None:
        self.code_files, self.uses = code_files, set[str]()

    def write(self, node: object, scope: Mapping[str, str | None]) -> str:
        """Like `ast.dump`, but without empty fields, which differ between versions of Python. `scope`: what imported
        and top-level names stand for."""
        if isinstance(node, list):
            return f"[{','.join(self.write(each, scope) for each in node if not isinstance(each, _IMPORTS))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name | ast.Attribute) and (name := self._name(node, scope)):
            return name
        if isinstance(node, ast.Constant) and node.value in self.code_files:
            return f"{node.value!r} {self.code_files[node.value]}"
        if isinstance(node, _DEFINITIONS) and _is_docstring(node.body[0]):
            node.body = node.body[1:]
        if isinstance(node, _SCOPES):
            scope = {**scope, **_bound(ast.iter_child_nodes(node))}  # its variables stand for nothing
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        skipped = "annotation" if isinstance(node, ast.arg) else "returns"
        parts = (f"{name}={self.write(value, scope)}" for name, value in fields if name != skipped)
        return f"{type(node).__name__}({','.join(parts)})"

    def _name(self, node: ast.Name | ast.Attribute, scope: Mapping[str, str | None]) -> str | None:
        """A name, or a chain of attributes that begins with one that stands for something; else None."""
        chain: list[str] = []
        here: ast.expr = node
        while isinstance(here, ast.Attribute):
            chain.append(here.attr)
            here = here.value
        if not isinstance(here, ast.Name):
            return None
        full, rest = scope.get(here.id), chain[::-1]
        if full is None or not isinstance(here.ctx, ast.Load):
            return None if chain else here.id
        while rest and (not full.startswith("repro") or full in _files()):
            full, rest = f"{full}.{rest[0]}", rest[1:]
        if full.startswith("repro."):
            self.uses.add(full)
            full = full.rpartition(".")[2]  # where it stands does not count
        return ".".join([full, *rest])
