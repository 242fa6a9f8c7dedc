"""Which code made a number: a hash of the definitions that an experiment can reach.

A definition is a top-level function, class or assignment. The hash takes each one that the experiment uses, directly or
through others, as syntax without comments, docstrings and the annotations of functions. It does not know where a
definition stands, by what import it is found, or in what order: moving code between files leaves the hash as it was.
Renaming a definition or changing it does not. Limits: what is found by a name made at run time is not followed, and of
two used definitions with the same name the hash does not tell which is called where.
"""

import ast
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

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
    """A file: its definitions, and what its names imported from `repro` stand for."""

    definitions: tuple[Definition, ...]
    imports: dict[str, str]


def digest(*parts: bytes) -> str:
    """Short SHA-256 of `parts`."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def source_hash(*modules: str) -> str:
    """Hash of all that `modules` define and of every definition in `repro` that those use. A package: all its modules."""
    known = len(_kept())
    roots = [name for module in modules for name in _inside_package(module)]
    todo = [(module, definition) for module in roots for definition in _module(module).definitions]
    seen, imported = set[tuple[str, str]](), set(roots)
    while todo:
        place, definition = todo.pop()
        if (place, definition.digest) in seen:
            continue
        seen.add((place, definition.digest))
        for home, found in (each for name in definition.uses for each in _find(name)):
            todo.append((home, found))
            packages = itertools.accumulate(home.split("."), "{}.{}".format)  # the module and those above it
            for run in set(filter(is_module, packages)) - imported:  # statements that act when a module is imported
                imported.add(run)
                todo += [(run, each) for each in _module(run).definitions if not each.names]
    if len(_kept()) > known:
        with contextlib.suppress(OSError), replacing(_store()) as temporary:
            temporary.write_bytes(_MODULES.dump_json(_kept()))
    return digest(*sorted({text.encode() for _, text in seen}))


def _inside_package(module: str) -> list[str]:
    """A module, and those below it where it is a package."""
    file = _file(module)
    assert file is not None, module
    if file.name != "__init__.py":
        return [module]
    below = (path.relative_to(file.parent).with_suffix("") for path in sorted(file.parent.rglob("*.py")))
    return [".".join((module, *path.parts)).removesuffix(".__init__") for path in below]


def _find(name: str) -> list[tuple[str, Definition]]:
    """What a dotted name stands for, with its module: one definition, or all of a module that is used as a value."""
    if name.startswith(STORAGE):
        return []
    if is_module(name):
        return [(name, definition) for definition in _module(name).definitions]
    place, _, own = name.rpartition(".")
    if not is_module(place):
        return []
    module = _module(place)
    found = [(place, definition) for definition in module.definitions if own in definition.names]
    return found or (_find(module.imports[own]) if own in module.imports else [])


@functools.cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module or package of `repro`."""
    return _file(name) is not None


def _file(module: str) -> Path | None:
    """The source of a `repro` module. Python's own finder would import the packages above it, torch with them."""
    root, *parts = module.split(".")
    base = _SOURCE.joinpath(*parts)
    places = (base / "__init__.py", base.with_suffix(".py"))
    return next((place for place in places if root == "repro" and place.exists()), None)


# --- one file ------------------------------------------------------------------------------------------------------


def parse(text: str, name: str, code_files: Mapping[str, str] | None = None) -> Module:
    """Definitions and imports of the module `name` with source `text`. `code_files`: digests of the files in other
    languages beside it, by name; a definition that names one depends on it."""
    body = [statement for statement in ast.parse(text).body if not _for_checkers(statement)]
    bound = {id(statement): _bound(statement) for statement in body}
    imports = dict(pair for statement in body for pair in _imported([statement]))
    scope = {own: f"{name}.{own}" for names in bound.values() for own in names} | imports
    definitions = []
    for statement in body:
        if isinstance(statement, _IMPORTS) or _is_docstring(statement) or bound[id(statement)] == ("__all__",):
            continue
        writer = _Writer(code_files or {})
        code = writer.write(statement, scope)
        definitions.append(Definition(bound[id(statement)], digest(code.encode()), tuple(sorted(writer.uses))))
    return Module(tuple(definitions), {alias: full for alias, full in imports.items() if full.startswith("repro.")})


def _for_checkers(statement: ast.stmt) -> bool:
    """Whether only a type checker sees this statement."""
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _within(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Nodes at or below some, without the insides of the functions, classes and comprehensions among them."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_SCOPES, ast.ClassDef)):
            yield from _within(list(ast.iter_child_nodes(node)))


def _bound(*statements: ast.AST) -> tuple[str, ...]:
    """Names that statements define, imports apart."""
    names: list[str] = []
    for node in _within(list(statements)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, _DEFINITIONS):
            names.append(node.name)
    return tuple(dict.fromkeys(names))


def _imported(statements: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """(name here, dotted name there) of the import statements at or below some."""
    for node in _within(statements):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


class _Writer:
    """Writes a statement as text in which every name is what it stands for, and collects those of `repro`."""

    def __init__(self, code_files: Mapping[str, str]) -> None:
        self.code_files, self.uses = code_files, set[str]()

    def write(self, node: object, scope: Mapping[str, str]) -> str:
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
            scope = _inside(node, scope)
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        skipped = "annotation" if isinstance(node, ast.arg) else "returns"
        parts = (f"{name}={self.write(value, scope)}" for name, value in fields if name != skipped)
        return f"{type(node).__name__}({','.join(parts)})"

    def _name(self, node: ast.Name | ast.Attribute, scope: Mapping[str, str]) -> str | None:
        """A name, or a chain of attributes that begins with one that stands for something; else None."""
        chain: list[str] = []
        here: ast.expr = node
        while isinstance(here, ast.Attribute):
            chain.append(here.attr)
            here = here.value
        if not isinstance(here, ast.Name):
            return None
        if here.id not in scope or not isinstance(here.ctx, ast.Load):
            return None if chain else here.id
        full, rest = scope[here.id], chain[::-1]
        while rest and (not full.startswith("repro") or is_module(full)):
            full, rest = f"{full}.{rest[0]}", rest[1:]
        if full.startswith("repro."):
            self.uses.add(full)
            full = full.rpartition(".")[2]  # where it stands does not count
        return ".".join([full, *rest])


def _inside(node: ast.AST, scope: Mapping[str, str]) -> dict[str, str]:
    """What names stand for inside a function or comprehension: its own variables stand for nothing, its imports do."""
    children = list(ast.iter_child_nodes(node))
    arguments = ast.walk(getattr(node, "args", ast.Pass()))
    variables = {each.arg for each in arguments if isinstance(each, ast.arg)} | set(_bound(*children))
    variables -= {name for each in _within(children) if isinstance(each, ast.Global) for name in each.names}
    return {name: full for name, full in scope.items() if name not in variables} | dict(_imported(children))


# --- kept between processes ----------------------------------------------------------------------------------------


_MODULES = TypeAdapter(dict[str, Module])


@functools.cache
def _module(name: str) -> Module:
    """A module, parsed once for each content of its file: parsing all takes a second or two."""
    file = _file(name)
    assert file is not None, name
    text, beside = file.read_bytes(), _code_files(file.parent)
    key = digest(name.encode(), text, _layout(), repr(beside).encode())
    kept = _kept()
    if key not in kept:
        kept[key] = parse(text.decode(), name, beside)
    return kept[key]


@functools.cache
def _code_files(folder: Path) -> dict[str, str]:
    return {path.name: digest(path.read_bytes()) for path in sorted(folder.iterdir()) if path.suffix in _CODE_FILES}


@functools.cache
def _layout() -> bytes:
    """The names of all modules: what a dotted name stands for depends on them."""
    return "\n".join(sorted(str(path.relative_to(_SOURCE)) for path in _SOURCE.rglob("*.py"))).encode()


def _store() -> Path:
    return paths.root() / ".cache/definitions.json"


@functools.cache
def _kept() -> dict[str, Module]:
    """Modules that this or an earlier process has parsed; a file that cannot be used counts as not there."""
    try:
        return _MODULES.validate_json(_store().read_bytes())
    except (OSError, ValidationError):
        return {}
