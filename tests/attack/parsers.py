"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack import checkpoint_samples
from attack.fuzz import Parser

PARSERS: dict[str, Parser] = {
    "checkpoint-index": checkpoint_samples.PARSER,
}
