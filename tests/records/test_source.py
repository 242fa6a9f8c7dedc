"""The source hash: blind to where code stands, not to what it does."""

import ast
import json

import pytest

from repro.records import source

START = {
    "experiments/trial.py": """
from repro import engine
from repro.engine import fast as quick

LIMIT = 3

def run(point):
    return quick(point, LIMIT) + engine.slow(point)
""",
    "engine.py": '''
"""An engine."""
import numpy as np

def fast(point, limit):
    return np.sum(point) * limit

def slow(point):
    """Slow."""
    return _helper(point)

def _helper(point):
    return point + 1

def unrelated():
    return 7
''',
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Hash of `repro.experiments.trial` in a package of the given files."""

    def hashed(files):
        monkeypatch.setattr(source, "_SOURCE", tmp_path)
        for old in [*tmp_path.rglob("*.py"), *tmp_path.rglob("*.cpp")]:
            old.unlink()
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for folder in {tmp_path, *(path.parent for path in tmp_path.rglob("*.py"))}:
            (folder / "__init__.py").touch()
        forget()
        return source.source_hash("repro.experiments.trial")

    def forget():
        for cached in (source._module, source._files, source._kept, source._code_files):
            cached.cache_clear()

    monkeypatch.setattr(source, "_store", lambda: tmp_path / "source_hashes.json")
    yield hashed
    forget()


def changed(file, old, new):
    assert old in START[file]
    return START | {file: START[file].replace(old, new)}


@pytest.mark.parametrize(
    "files",
    [
        changed("engine.py", '"""An engine."""', '"""Another text."""  # and a comment'),
        changed("engine.py", "def slow(point):", "def slow(point: int) -> int:"),
        changed("engine.py", "import numpy as np", "import numpy as np\nimport os"),
        changed("engine.py", "return 7", "return 8"),  # nobody here uses it
        changed("experiments/trial.py", "quick", "fast"),
    ],
    ids=["texts", "annotations", "imports", "unused code", "another alias"],
)
def test_stays(tree, files):
    assert tree(files) == tree(START)


def test_stays_when_code_moves(tree):
    """To other files, found by other imports, in another order; the experiment becomes a package that loads its parts late."""
    moved = {
        "experiments/trial/__init__.py": """
def run(point):
    from repro.tools.quick import fast
    from repro.tools import slowly as s
    return fast(point, LIMIT) + s.slow(point)

from repro.experiments.trial.limits import LIMIT
""",
        "experiments/trial/limits.py": "LIMIT = 3\n",
        "tools/quick.py": "from numpy import sum\n\ndef fast(point, limit):\n    return sum(point) * limit\n",
        "tools/slowly.py": """
from repro.tools.help import _helper

def slow(point):
    return _helper(point)
""",
        "tools/help.py": "def _helper(point):\n    return point + 1\n",
    }
    assert tree(moved) == tree(START)


def test_a_package_stands_for_all_its_modules(tree):
    """The module `run` of an experiment is found by its name when a point runs."""
    files = {"experiments/trial/__init__.py": "LIMIT = 3\n", "experiments/trial/run.py": "def run(point): return point"}
    assert tree(files) != tree(files | {"experiments/trial/run.py": "def run(point): return -point"})


@pytest.mark.parametrize(
    "files",
    [
        changed("engine.py", "point + 1", "point + 2"),
        changed("engine.py", "np.sum", "np.prod"),
        changed("engine.py", "def unrelated", "np.seterr(all='raise')\n\ndef unrelated"),
        changed("experiments/trial.py", "LIMIT = 3", "LIMIT = 4"),
        changed("experiments/trial.py", "import fast as quick", "import slow as quick"),
        changed(
            "engine.py",
            "    return np.sum(point) * limit",
            "    global _last\n    _last = 1\n    return _last\n_last = 5",
        ),
    ],
    ids=[
        "what a helper does",
        "a library's function",
        "an act on import",
        "a constant",
        "another function",
        "a global",
    ],
)
def test_changes(tree, files):
    assert tree(files) != tree(START)


def test_a_global_that_is_written_is_used(tree):
    files = changed(
        "engine.py", "    return np.sum(point) * limit", "    global _last\n    _last += 1\n    return _last\n_last = 5"
    )
    other = files | {"engine.py": files["engine.py"].replace("_last = 5", "_last = 6")}
    assert tree(files) != tree(other)


def test_a_parameter_hides_what_has_its_name(tree):
    """`point` of a function is not the module `point` that another function imports."""
    files = changed("engine.py", "import numpy as np", "import numpy as np\nfrom repro import point") | {
        "point.py": "x = 1\n"
    }
    assert tree(files) == tree(files | {"point.py": "x = 2\n"})


def test_code_in_other_languages_counts(tree):
    files = changed("engine.py", "return point + 1", "return build('kernel.cpp', point)")
    assert tree(files | {"kernel.cpp": "int x = 1;"}) != tree(files | {"kernel.cpp": "int x = 2;"})


def test_code_for_gpus_has_a_hash_of_its_own(tree):
    kernel = {"engine_gpu.py": "import triton\n\ndef kernel(x):\n    return x + 1\n"}
    start = (
        changed("engine.py", "return point + 1", "from repro.engine_gpu import kernel; return kernel(point)") | kernel
    )
    both = tree(start), source.gpu_hash("repro.experiments.trial")
    assert both[0] != tree(START) and both[1] != source.gpu_hash("repro.experiments.trial")
    edited = start | {"engine_gpu.py": kernel["engine_gpu.py"].replace("+ 1", "+ 2")}
    assert tree(edited) == both[0] and source.gpu_hash("repro.experiments.trial") != both[1]
    tree(start | {"engine.py": start["engine.py"].replace("np.sum", "np.prod")})
    assert source.gpu_hash("repro.experiments.trial") == both[1]


def test_a_hash_is_kept_and_a_file_that_was_cut_is_not_read(tree, tmp_path):
    first = tree(START)
    store = tmp_path / "source_hashes.json"
    store.write_text(json.dumps(json.loads(store.read_text()) | {"repro.experiments.trial": ["kept", ""]}))
    assert tree(START) == "kept"
    (tmp_path / "source_hashes.json").write_text('{"sources": ')
    assert tree(START) == first


def test_what_editors_and_systems_leave_beside_the_code_is_no_code(tree, tmp_path):
    """Locks of Emacs, which are links to nothing; macOS's half of a file; what Jupyter keeps of one."""
    first = tree({"experiments/trial/__init__.py": "LIMIT = 3\n"})
    folder = tmp_path / "experiments/trial"
    for name in (".#run.py", ".#rows.toml"):
        (folder / name).symlink_to("me@host.17:1")
    (folder / "._run.py").write_bytes(b"\0\5\x16\7\xff")
    (folder / ".ipynb_checkpoints").mkdir()
    (folder / ".ipynb_checkpoints/run-checkpoint.py").write_text("def run(): return 1\n")
    (tmp_path / "source_hashes.json").unlink()
    for cached in (source._module, source._files, source._kept, source._code_files):
        cached.cache_clear()
    assert source.source_hash("repro.experiments.trial") == first


def test_does_not_depend_on_empty_fields():
    """Newer versions of Python have more of them (type_params), and print fewer."""
    code = ast.parse("def f(x):\n    return x\n").body[0]
    code.type_params = []
    first = source._Writer({}).write(code, {})
    code.type_comment = None
    code.future_field = []
    assert source._Writer({}).write(code, {}) == first and "f" in first


def test_follows_the_engines():
    """The training experiment depends on the quantisers, the placement experiment does not."""

    def reached(module):
        todo, seen = source._inside_package(module), set()
        while todo:
            name = todo.pop()
            for home, definition in source._find(name):
                if (home, definition.digest) not in seen:
                    seen.add((home, definition.digest))
                    todo += definition.uses
        return {home for home, _ in seen}

    train, place = reached("repro.experiments.zero_train"), reached("repro.experiments.exflow_placement")
    assert {"repro.quantize", "repro.launch", "repro.zero.engine"} <= train
    assert "repro.quantize" not in place and "repro.exflow.placement" in place
