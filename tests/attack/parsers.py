"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack import model_files
from attack.fuzz import Parser

PARSERS: dict[str, Parser] = {
    "gguf": model_files.GGUF,
    "safetensors": model_files.SAFETENSORS,
    "config": model_files.CONFIG,
}
