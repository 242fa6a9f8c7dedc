"""The parsers that are fuzzed, by name. A parser's module has its `Parser` (valid files, how to read one, its refusals)."""

from attack import checkpoint_samples, model_files, record_files, trace_files, yaml_files
from attack.fuzz import Parser

PARSERS: dict[str, Parser] = {
    "checkpoint": checkpoint_samples.PARSER,
    "config": model_files.CONFIG,
    "gguf": model_files.GGUF,
    "npy": trace_files.NPY,
    "npz": trace_files.NPZ,
    "record": record_files.RECORD,
    "safetensors": model_files.SAFETENSORS,
    "series": record_files.PARQUET,
    "trace": trace_files.PARQUET,
    "yaml": yaml_files.YAML,
}
