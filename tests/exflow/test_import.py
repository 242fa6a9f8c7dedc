"""`repro.exflow` without the packages of its extra."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["highspy", "pyarrow", "scipy", "threadpoolctl"])
def test_a_missing_package_names_the_extra(package):
    program = f"import sys; sys.modules['{package}'] = None; import repro.exflow"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ImportError: repro.exflow needs {package}: pip install 'repro-papers[exflow]'" in done.stderr
