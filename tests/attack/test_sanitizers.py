"""The kernels in C++, built with AddressSanitizer and UBSan, over mutated model files and the shapes of their tests. What
either finds ends the process."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro import paths

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
OPTIONS = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
CHOSEN = {  # which tests of a file reach the kernels, by words in their names
    "tests/attack/test_fuzz.py": "gguf or safetensors or config",
    "tests/attack/test_models.py": "entry_point or valid",
    "tests/models/test_kernels.py": "(torch or bit or steps or wide) and not compiler",
    "tests/models/test_linear.py": "test",
}
OVERFLOW = '#include <vector>\nextern "C" int read_at(int i) { std::vector<int> four(4); return four.data()[i]; }\n'
READ = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).read_at(int(sys.argv[2])))"


@functools.cache
def libraries() -> list[str]:
    """What has to be loaded before Python, which is not built with them; empty where the compiler has none of it."""
    if COMPILER is None:
        return []
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip() for name in names]
    return found if all(map(os.path.isabs, found)) else []  # a name alone: not found


def run(folder: Path, *command: object) -> subprocess.CompletedProcess:
    """Python under the sanitizers, which builds the kernels with them in `folder`."""
    # Python keeps memory to its end: not a leak. The allocator may refuse what is too large, as the usual one does.
    environment = {
        "LD_PRELOAD": " ".join(libraries()),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CXX": str(folder / "c++"),
        "TORCH_EXTENSIONS_DIR": str(folder),
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=paths.root(),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not libraries():
        pytest.skip(f"the compiler ({COMPILER}) has no AddressSanitizer or no UBSan")
    folder = tmp_path_factory.mktemp("sanitized")
    compiler = folder / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" {OPTIONS}\n')
    compiler.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def built(folder):
    """Not by the first test that needs the kernels: on a busy machine the compiler alone outlasts what a test may."""
    ended = run(folder, "-c", "from repro.models.kernels import cpp; cpp._load()")
    assert ended.returncode == 0 and list(folder.glob("repro_models_*.so")), ended.stderr
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize(("index", "found"), [(3, None), (4, "heap-buffer-overflow"), (2**31 - 1, "AddressSanitizer")])
def test_the_sanitizers_find_a_read_beyond_the_end(folder, index, found):
    (folder / "read.cpp").write_text(OVERFLOW)
    library = folder / "read.so"
    subprocess.run([folder / "c++", "-shared", "-fPIC", folder / "read.cpp", "-o", library], check=True)
    ended = run(folder, "-c", READ, library, index)
    assert (ended.returncode == 0 and ended.stdout == "0\n") if found is None else found in ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_under_sanitizers(built):
    chosen = " or ".join(f"({Path(file).stem} and ({words}))" for file, words in CHOSEN.items())
    plain = [word for name in ("xdist", "faulthandler", "cacheprovider") for word in ("-p", f"no:{name}")]
    ended = run(built, "-m", "pytest", *plain, "-rfEp", "-k", chosen, *CHOSEN)
    said = ended.stdout[-6000:] + ended.stderr[-6000:]
    assert ended.returncode == 0, said
    assert [file for file in CHOSEN if f"PASSED {file}" not in ended.stdout] == [], said
    assert "Sanitizer" not in said and "runtime error" not in said, said
    assert len(list(built.glob("repro_models_*.so"))) == 1, "built again, without the sanitizers"
