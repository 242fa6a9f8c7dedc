"""Make `data/python_stdlib.txt`: modules of CPython's standard library, one after another, each under a line with its name.

    python3.11 benchmarks/inputs/python_stdlib.py data/python_stdlib.txt

The shipped file is of CPython 3.11.7; other versions give other texts. The modules are well known, ASCII, and carry no notice of a
copyright or licence other than Python's own (LICENSES.md).
"""

import sys
import sysconfig
from pathlib import Path

MODULES = (
    "argparse", "collections/__init__", "configparser", "dataclasses", "datetime", "enum", "http/client", "inspect", "pathlib",
    "pickle", "random", "shutil", "socket", "tempfile", "threading", "traceback", "typing", "unittest/case",
)  # fmt: skip


def text(library: Path) -> str:
    """The modules of the standard library in folder `library`, in the order of MODULES."""
    return "".join(f"# CPython: Lib/{name}.py\n{(library / f'{name}.py').read_text('ascii')}\n" for name in MODULES)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(text(Path(sysconfig.get_path("stdlib"))), "ascii")
