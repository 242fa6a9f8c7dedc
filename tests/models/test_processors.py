"""The kernels in C++ as they are built for other processors than this one."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro import paths

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
CHOICE = "(torch or bit or steps or threads) and not compiler and not onednn and not one_dnn"  # what enters the kernels


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(platform.machine() != "x86_64" or COMPILER is None, reason="needs a compiler for x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake"])
def test_kernels_for_an_older_processor(processor, tmp_path):
    """Vectors of 4 and of 8, and of 16 without products of bfloat16 and with them, without matrix units: the compiler's
    last -march counts. Without matrix units the last of them is what this processor builds for itself."""
    needed = {"skylake-avx512": "avx512vl", "cooperlake": "amx_bf16"}.get(processor, "")
    if needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {needed}")
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -march={processor}\n')
    compiler.chmod(0o755)
    files = [str(Path(__file__).with_name(name)) for name in ("test_kernels.py", "test_linear.py")]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", CHOICE, *files],
        cwd=paths.root(),
        env=os.environ | {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout[-6000:] + ended.stderr[-6000:]
    assert list(tmp_path.glob("repro_models_*.so"))
