"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack.fuzz import Parser
from attack.yaml_files import YAML

PARSERS: dict[str, Parser] = {"yaml": YAML}
