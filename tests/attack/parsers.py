"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack import record_files
from attack.fuzz import Parser

PARSERS: dict[str, Parser] = {
    "record": record_files.RECORD,
    "parquet": record_files.PARQUET,
}
