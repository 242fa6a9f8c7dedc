"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack import trace_files
from attack.fuzz import Parser

PARSERS: dict[str, Parser] = {
    "npz": trace_files.NPZ,
    "npy": trace_files.NPY,
    "trace-parquet": trace_files.PARQUET,
}
