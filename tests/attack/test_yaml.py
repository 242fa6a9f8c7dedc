"""YAML that anybody may have written: configuration, platforms, claims, and the values of `--set`."""

import os
import resource
import sys
import time
from pathlib import Path

import pytest
import yaml
from attack.promises import command, command_refuses, refuses
from attack.yaml_files import CLAIMS, CONFIG, PLATFORM

from repro.claims import document
from repro.cli import settings
from repro.plan import config, documents
from repro.plan import jobs as plan
from repro.plan.config import ConfigError

SECONDS, MEMORY = 5, 1 << 30


def row(what: str, given, *words):
    return pytest.param(given, words, id=what)


def laughs(lines: int, first: str, following: str) -> str:
    """A document whose every line stands for nine times the one before."""
    text = [f"a0: &a0 {first}"]
    text += [f"a{n}: &a{n} " + following.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, lines)]
    return "\n".join(text)


def chain(levels: int) -> str:
    """Few characters, no nesting as it is written, and as many levels as it has lines."""
    return "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels))])


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(100 << 20)


# What a file may hold or be: text, bytes, or a function that makes it. The same is promised for each kind of file.
FILES = [
    row("no file", lambda path: None, "cannot be read: No such file"),
    row("a folder", Path.mkdir, "ordinary file"),
    row("a FIFO", os.mkfifo, "ordinary file"),
    row("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero"), "ordinary file"),
    row("a link to /dev/null", lambda path: path.symlink_to("/dev/null"), "ordinary file"),
    row("a link to nothing", lambda path: path.symlink_to("nothing"), "cannot be read: No such file"),
    row("a link to itself", lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    row("100 MB", sparse, "has more than 1 MiB"),
    row("nothing", "", "the document", "found None", "a mapping"),
    row("a comment alone", "# nothing", "the document", "found None"),
    row("a list at the top", "- platform: laptop", "the document", "found [", "a mapping"),
    row("a text at the top", "laptop", "the document", "found 'laptop'"),
    row("a number at the top", "5", "the document", "found 5"),
    row("a NUL byte", "platform: \0", "not valid YAML"),
    row("a byte that is not UTF-8", b"platform: \xff", "not UTF-8"),
    row("UTF-16", "platform: laptop".encode("utf-16"), "not UTF-8"),
    row("half a surrogate pair", 'platform: "\\ud800"', "not valid YAML"),
    row("random bytes", bytes(range(256)), "not UTF-8"),
    row("two documents", "a: 1\n---\nb: 2\n", "not valid YAML"),
    row("a list that is not closed", "experiments: [", "not valid YAML"),
    row("a text that is not closed", 'experiments: "', "not valid YAML"),
    row("tabs for spaces", "experiments:\n\tzero_train: 1", "not valid YAML"),
    row("a key twice", "platform: a\nplatform: b", "the document", "key given twice: platform"),
    row("a key twice below", "a:\n  - b: {c: 1, d: 2, c: 3}", "a.0.b:", "key given twice: c"),
    row("20,000 keys, many twice", "\n".join(f"k{n % 11000}: 1" for n in range(20000)), "key given twice"),
    row("an alias of nothing", "a: *b", "not valid YAML", "undefined alias"),
    row("a list that holds itself", "a: &a [*a]", "a: found aliases", "for themselves"),
    row("a mapping that holds itself", "a: &a {b: {c: *a}}", "found aliases", "for themselves"),
    row("a mapping that merges itself", "a: &a {<<: *a}", "found aliases", "for themselves"),
    row("a billion laughs in lists", laughs(12, "[lol, lol]", "[{}]"), "found aliases", "4,194,304 characters"),
    row("a billion laughs in mappings", laughs(12, "{b: 1}", "{{c: [{}]}}"), "found aliases"),
    row("a billion laughs in merges", laughs(12, "{b: 1}", "{{<<: [{}]}}"), "found aliases"),
    row("a long text a million times", f"a: &a {'x' * 9000}\nb: [{'*a, ' * 200000}]", "b: found aliases"),
    row("aliases of 5000 levels", chain(5000), "too many levels", "allowed: 30"),
    row("100 lists in lists", "a: " + "[" * 100 + "]" * 100, "a.0.0.0", "too many levels; allowed: 30"),
    row("100 mappings in mappings", "{a: " * 100 + "}" * 100, "a.a.a", "too many levels; allowed: 30"),
    row("5000 lists in lists", "a: " + "[" * 5000 + "]" * 5000, "too many levels; allowed: 30"),
    row("5000 mappings in mappings", "{a: " * 5000 + "}" * 5000, "too many levels"),
    row("1000 levels of lines", "\n".join(" " * n + "a:" for n in range(1000)), "too many levels"),
    row("half a million brackets", "[" * 500_000, "too many levels"),
    row("a tag that runs code", "a: !!python/object/apply:os.system [touch P]", "a: found a sequence", "python/object"),
    row("a tag that imports", "a: !!python/name:os.system ''", "a: found ''", "python/name"),
    row("a tag that makes an object", "a: !!python/object:pathlib.Path {b: 1}", "a: found a mapping, read as"),
    row("a tag of its own", "a: [1, !own 5]", "a.1: found '5', read as '!own'"),
    row("a tag on aliases", laughs(12, "[lol]", "!own [{}]"), "a1: found a sequence"),
    row("bytes", "a: !!binary aGVsbG8=", "a: found 'aGVsbG8=', read as 'binary'"),
    row("a set", "a: !!set {b}", "a: found a mapping, read as 'set'"),
    row("an ordered mapping", "a: !!omap [b: 1]", "a: found a sequence, read as 'omap'"),
    row("a date", "a: 2024-01-01", "a: found '2024-01-01', read as 'timestamp'", "in quotes"),
    row("a date that is none", "a: 2024-13-45", "a: found '2024-13-45', read as 'timestamp'"),
    row("an equals sign", "a: =", "a: found '=', read as 'value'"),
    row("infinity", "a: {b: .inf}", "a.b: found '.inf'; allowed: finite numbers"),
    row("minus infinity", "a: -.Inf", "a: found '-.Inf'"),
    row("not a number", "a: .nan", "a: found '.nan'"),
    row("a float beyond the largest", "a: 1.0e+999", "a: found '1.0e+999'"),
    row("a float of a thousand digits", f"a: 1.{'0' * 1000}", "a: found '1.000"),
    row("an integer beyond 64 bits", f"a: {2**63}", "a: found '9223372036854775808'", "64 bits"),
    row("an integer below 64 bits", f"a: {-(2**63)}", "a: found '-9223372036854775808'"),
    row("ten to the 400", f"a: 1{'0' * 400}", "a: found '1000"),
    row("an integer of 5000 digits", f"a: {'9' * 5000}", "a: found '9999"),
    row("a hexadecimal of 5000 digits", f"a: 0x{'f' * 5000}", "a: found '0xff"),
    row("base 60 with 300,000 digits", "a: 1" + ":59" * 300_000, "a: found '1:59"),
    row("a word as integer", "a: !!int abc", "a: found 'abc'; allowed: finite numbers"),
    row("nothing as integer", 'a: !!int ""', "a: found ''"),
    row("nothing as number", 'a: !!float ""', "a: found ''"),
    row("a list as integer", "a: !!int [1]", "not valid YAML"),
    row("a word as boolean", "a: !!bool maybe", "not valid YAML"),
    row("a mapping as text", "a: !!str {b: 1}", "not valid YAML"),
    row("a text as mapping", "a: !!map b", "not valid YAML"),
    row("a merge of a list of numbers", "a: {<<: [1, 2]}", "not valid YAML"),
    row("a merge of a text", "a: {<<: b}", "not valid YAML"),
    row("`no` as a key", "a: {no: 1}", "a: found the key 'no', read as 'bool'"),
    row("a number as a key", "a: {1: 1}", "a: found the key '1', read as 'int'"),
    row("null as a key", "a: {~: 1}", "a: found the key '~', read as 'null'"),
    row("a date as a key", "a: {2024-01-01: 1}", "a: found the key '2024-01-01'"),
    row("a list as a key", "a: {[b]: 1}", "a: found the key a sequence"),
    row("a key of lists twice", "a: {[b]: 1, [b]: 2}", "a: found the key a sequence"),
    row("an unknown key with an escape sequence", 'a: 1\n"\\e[31m": {b: .nan}', "'\\x1b[31m'.b: found '.nan'"),
]
KINDS = {
    "config.yaml": lambda path: config.load_yaml(path, config.Config),
    "frontier.yaml": lambda path: config.load_yaml(path, config.Platform),
    "claims.yaml": document.read,
}


OF_ALL_KINDS = (
    "no file",
    "a FIFO",
    "100 MB",
    "a key twice",
    "a list at the top",
)  # which are read by the same function


@pytest.mark.parametrize(
    "given, words, kind",
    [
        pytest.param(*each.values, kind, id=f"{each.id}, {kind}")
        for each in FILES
        for kind in KINDS
        if kind == "config.yaml" or each.id in OF_ALL_KINDS
    ],
)
def test_what_no_file_may_be(given, words, kind, tmp_path):
    path = tmp_path / kind
    if callable(given):
        given(path)
    else:
        path.write_bytes(given if isinstance(given, bytes) else given.encode())
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # else no more than the peak of earlier tests would not be seen
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    said = refuses(lambda: KINDS[kind](path), ConfigError, path, *words)
    assert time.process_time() - start < SECONDS and len(said) < 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY / 1024


def test_values_that_were_read_before_are_nobody_elses():
    documents.parse("a: {b: [1]}", "here")["a"]["b"].append(2)
    assert documents.parse("a: {b: [1]}", "here") == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    "text, value",
    [
        pytest.param("a: 1_000", {"a": 1000}, id="a number with underscores"),
        pytest.param("a: 010", {"a": 8}, id="octal, as YAML 1.1 has it"),
        pytest.param("a: 0o10", {"a": "0o10"}, id="octal of YAML 1.2 is a text"),
        pytest.param("a: 1e3", {"a": "1e3"}, id="a float without a dot is a text"),
        pytest.param("a: 1:30", {"a": 90}, id="base 60"),
        pytest.param("a: [yes, off]", {"a": [True, False]}, id="words for booleans"),
        pytest.param("a: 'no'", {"a": "no"}, id="a word in quotes"),
        pytest.param("a: '2024-01-01'", {"a": "2024-01-01"}, id="a date in quotes"),
        pytest.param("a: !!str 5", {"a": "5"}, id="a number as text"),
        pytest.param("a:", {"a": None}, id="no value"),
        pytest.param(f"a: {2**63 - 1}", {"a": 2**63 - 1}, id="the largest integer"),
        pytest.param("\ufeffa: 1", {"a": 1}, id="a byte order mark"),
        pytest.param("a: 1\r\nb: 2\r\n", {"a": 1, "b": 2}, id="lines of Windows"),
        pytest.param("a: &x [1]\nb: *x", {"a": [1], "b": [1]}, id="an alias"),
        pytest.param("a: &x {b: 1}\nc: {<<: *x, b: 2}", {"a": {"b": 1}, "c": {"b": 2}}, id="a merge, overridden"),
        pytest.param(
            "a: &x {b: 1}\nc: &y {<<: *x, b: 2}\nd: {<<: *y, b: 3}",
            {"a": {"b": 1}, "c": {"b": 2}, "d": {"b": 3}},
            id="a merge of a merge",
        ),
        pytest.param("a: " + "[" * 29 + "]" * 29, None, id="as many levels as are allowed"),
        pytest.param("a: é×", {"a": "é×"}, id="letters beyond ASCII"),
    ],
)
def test_what_values_become(text, value):
    found = documents.parse(text, "here")
    assert value is None or (found == value and repr(found) == repr(value))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with small files, and nothing else."""
    (tmp_path / "config/platforms").mkdir(parents=True)
    (tmp_path / "slurm/box").mkdir(parents=True)
    (tmp_path / "slurm/box/environment.sh").touch()
    (tmp_path / "results/reference/laptop-2core").mkdir(parents=True)
    (tmp_path / "config/config.yaml").write_text(CONFIG)
    (tmp_path / "config/claims.yaml").write_text(CLAIMS)
    (tmp_path / "config/platforms/laptop.yaml").write_text("description: here\ntier: laptop\n")
    (tmp_path / "config/platforms/cluster.yaml").write_text(PLATFORM)
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


GONE = object()


def change(path: Path, key: str, value: object) -> None:
    """Put `value` at `key` (`a.0.b`) of a file; GONE removes it."""
    whole = found = yaml.safe_load(path.read_text())
    *outer, last = [int(name) if name.isdigit() else name for name in key.split(".")]
    for name in outer:
        found = found[name]
    if value is GONE:
        del found[last]
    else:
        found[last] = value
    path.write_text(yaml.safe_dump(whole, sort_keys=False))


def cell(what: str, key: str, value: object, *words):
    return pytest.param(key, value, words, id=f"{key.rpartition('.')[2]}: {what}")


GRID = "experiments.exflow_placement.tiers.laptop.0"
BILLION = list(range(1000))
CONFIGS = [
    cell("misspelt", "plaform", "laptop", "plaform: ", "known keys: platform", "nearest: platform"),
    cell("unlike any", "xyz", 1, "xyz: ", "known keys: platform"),
    cell("false", "platform", False, "platform: ", "found False", "str"),
    cell("a number", "platform", 5, "platform: ", "found 5", "str"),
    cell("a list", "platform", ["laptop"], "platform: ", "found ['laptop']"),
    cell("null", "platform", None, "platform: ", "found None"),
    cell("empty", "platform", "", "platform: found ''", "allowed: cluster, laptop"),
    cell("a path", "platform", "../platforms/laptop", "platform: found '../platforms/laptop'"),
    cell("misspelt", "tier", "laptp", "tier: ", "found 'laptp'", "'laptop'"),
    cell("a number", "tier", 1, "tier: ", "found 1", "'smoke'"),
    cell("true", "tier", True, "tier: ", "found True"),
    cell("a number", "reference", 5, "reference: ", "found 5"),
    cell("missing", "reference", GONE, "reference: Field required"),
    cell("a path", "reference", "../../etc", "reference: ", "found '../../etc'", "letters, digits"),
    cell("two dots", "reference", "..", "reference: ", "found '..'", "letters, digits"),
    cell("not there", "reference", "nothere", "reference: found 'nothere'; allowed: laptop-2core"),
    cell("missing", "experiments", GONE, "experiments: Field required"),
    cell("a list", "experiments", [], "experiments: ", "found []"),
    cell("a text", "experiments", "zero_train", "experiments: ", "found 'zero_train'"),
    cell("null", "experiments", None, "experiments: ", "found None"),
    cell("unknown", "experiments.zero_trian", {"tiers": {}}, "experiments.zero_trian", "allowed: ", "zero_train"),
    cell("a path", "experiments", {"../zero_train": {"tiers": {}}}, "experiments.../zero_train: no such experiment"),
    cell("null", "experiments.flover_queue", None, "experiments.flover_queue: ", "found None", "keys tiers"),
    cell("a list", "experiments.flover_queue", [], "experiments.flover_queue: ", "found []"),
    cell("empty", "experiments.flover_queue", {}, "experiments.flover_queue.tiers: Field required"),
    cell("misspelt", "experiments.flover_queue.tires", {}, "flover_queue.tires: ", "nearest: tiers"),
    cell("a list", "experiments.flover_queue.tiers", [], "flover_queue.tiers: ", "found []"),
    cell("misspelt", "experiments.flover_queue.tiers.smok", [], "tiers.smok", "allowed keys: 'smoke'"),
    cell("a mapping", "experiments.flover_queue.tiers.smoke", {}, "tiers.smoke: ", "found a mapping"),
    cell("null", "experiments.flover_queue.tiers.smoke", None, "tiers.smoke: ", "found None"),
    cell("a number", "experiments.flover_queue.tiers.smoke.0", 5, "tiers.smoke.0: ", "found 5", "keys grid"),
    cell("misspelt", f"{GRID}.repeat", 2, f"{GRID}.repeat: ", "known keys: grid", "nearest: repeats"),
    cell("0", f"{GRID}.repeats", 0, f"{GRID}.repeats: ", "found 0", "int"),
    cell("-1", f"{GRID}.repeats", -1, f"{GRID}.repeats: ", "found -1"),
    cell("a text", f"{GRID}.repeats", "2", f"{GRID}.repeats: ", "found '2'", "int"),
    cell("a half", f"{GRID}.repeats", 2.5, f"{GRID}.repeats: ", "found 2.5"),
    cell("true", f"{GRID}.repeats", True, f"{GRID}.repeats: ", "found True"),
    cell("a list", f"{GRID}.repeats", [2], f"{GRID}.repeats: ", "found [2]"),
    cell("a billion", f"{GRID}.repeats", 10**9, f"{GRID}.repeats: ", "found 1000000000"),
    cell(
        "a million", f"{GRID}.repeats", 10**6, f"{GRID}.grid: found 4,000,000 points with those before; allowed: 20,000"
    ),
    cell("0", f"{GRID}.minutes", 0, f"{GRID}.minutes: ", "found 0", "float"),
    cell("-1", f"{GRID}.minutes", -1.0, f"{GRID}.minutes: ", "found -1.0"),
    cell("a text", f"{GRID}.minutes", "long", f"{GRID}.minutes: ", "found 'long'"),
    cell("true", f"{GRID}.minutes", True, f"{GRID}.minutes: ", "found True"),
    cell("beyond all time", f"{GRID}.minutes", 1e300, f"{GRID}.minutes: ", "found 1e+300"),
    cell("its limit", f"{GRID}.minutes", 600.0, f"{GRID}.minutes: ", "found 600; allowed: less than 10, a run's limit"),
    cell("infinite", f"{GRID}.minutes", float("inf"), f"{GRID}.minutes: found '.inf'"),
    cell("a list", f"{GRID}.grid", [], f"{GRID}.grid: ", "found []"),
    cell("null", f"{GRID}.grid", None, f"{GRID}.grid: ", "found None"),
    cell("misspelt", f"{GRID}.grid.gpu", 4, f"{GRID}.grid: gpu: ", "known keys", "nearest: gpus"),
    cell("an empty list", f"{GRID}.grid.gpus", [], f"{GRID}.grid: gpus: found an empty list", "at least one"),
    cell("a word", f"{GRID}.grid.gpus", "four", f"{GRID}.grid: gpus: ", "found 'four'", "int"),
    cell("-1", f"{GRID}.grid.gpus", [4, -1], f"{GRID}.grid: ", "gpus", "-1"),
    cell("not whole shares", f"{GRID}.grid.gpus", [5], f"{GRID}.grid: ", "gpus is 5", "16, 32"),
    cell("0", f"{GRID}.grid.gpus", 0, f"{GRID}.grid: ", "gpus", "0"),
    cell("a list in a list", f"{GRID}.grid.gpus", [[4]], f"{GRID}.grid: gpus: ", "found [4]"),
    cell("a mapping", f"{GRID}.grid.gpus", {"a": 4}, f"{GRID}.grid: gpus: ", "found a mapping"),
    cell("null", f"{GRID}.grid.gpus", None, f"{GRID}.grid: gpus: ", "found None"),
    cell("-1", f"{GRID}.grid.seed", -1, f"{GRID}.grid: seed: ", "found -1"),
    cell("nan", f"{GRID}.grid.time_limit_s", float("nan"), f"{GRID}.grid.time_limit_s: found '.nan'"),
    cell(
        "a billion points", f"{GRID}.grid", {"seed": BILLION, "gpus": BILLION, "train_tokens": BILLION}, "2,000,000,000"
    ),
    cell("20,002 points", f"{GRID}.grid", {"seed": list(range(10_000))}, "laptop.1.grid: found 20,002 points"),
    cell("a name of 100,000 letters", f"{GRID}.grid", {"x" * 100_000: 1}, f"{GRID}.grid: xxx"),
    cell("ten thousand unknown keys", f"{GRID}.grid", {f"k{n}": 1 for n in range(10_000)}, "and 9980 more"),
    cell("a value of 100,000 letters", f"{GRID}.grid.method", "x" * 100_000, "method", "'affinity'"),
]


@pytest.mark.parametrize("key, value, words", CONFIGS)
def test_a_configuration(key, value, words, root):
    path = root / "config/config.yaml"
    change(path, key, value)
    start = time.process_time()
    said = refuses(lambda: config.load(platform=None), ConfigError, path, *words)
    assert time.process_time() - start < SECONDS and len(said) < 20_000


SLURM = [
    cell("misspelt", "descripton", "x", "descripton: ", "nearest: description"),
    cell("missing", "description", GONE, "description: Field required"),
    cell("a number", "description", 5, "description: ", "found 5"),
    cell("unknown", "tier", "tiny", "tier: ", "found 'tiny'", "'laptop'"),
    cell("0", "memory_gb", 0, "memory_gb: ", "found 0"),
    cell("a text", "memory_gb", "64", "memory_gb: ", "found '64'", "float"),
    cell("nan", "memory_gb", float("nan"), "memory_gb: found '.nan'"),
    cell("a number", "hardware", 5, "hardware: ", "found 5"),
    cell("0", "slurm.pack_minutes", 0, "slurm.pack_minutes: ", "found 0"),
    cell("-1", "slurm.start_minutes", -1, "slurm.start_minutes: ", "found -1"),
    cell("misspelt", "slurm.pack_minute", 1, "slurm.pack_minute: ", "nearest: pack_minutes"),
    cell("a GPU twice", "slurm.gpus", [0, 0, 1, 2, 3, 4, 5, 6], "slurm.gpus: found [0, 0, 1", "each of 0 to 7 once"),
    cell("two words", "slurm.gres", "gpu:4 gpu:5", "slurm.gres: ", "found 'gpu:4 gpu:5'"),
    cell("a command", "slurm.gres", "gpu:4;touch P", "slurm.gres: ", "found 'gpu:4;touch P'"),
    cell("missing", "node", GONE, "node: found none; allowed with slurm: "),
    cell("a number", "node", 8, "node: ", "found 8", "keys packages"),
    cell("0", "node.gcds", 0, "node.gcds: ", "found 0"),
    cell("-1", "node.packages", -1, "node.packages: ", "found -1"),
    cell("true", "node.packages", True, "node.packages: ", "found True"),
    cell("a trillion", "node.gcds", 10**12, "node.gcds: ", "found 1000000000000"),
    cell("`yes` in quotes", "node.emulated", "yes", "node.emulated: ", "found 'yes'", "bool"),
    cell("one rank a node", "node", {"packages": 1, "gcds": 1}, "node: found 1 rank; allowed: two or more"),
    cell(
        "GPUs that options contradict",
        "node.gcds",
        3,
        "slurm.options: found --gpus-per-node=8, allowed: --gpus-per-node=",
    ),
    cell("misspelt", "node.gcd", 2, "node.gcd: ", "nearest: gcds"),
    cell("a list", "slurm", [], "slurm: ", "found []", "keys pack_minutes"),
    cell("misspelt", "slurm.acount", "x", "slurm.acount: ", "nearest: account"),
    cell("missing", "slurm.environment", GONE, "slurm.environment: Field required"),
    cell("a number", "slurm.environment", 5, "slurm.environment: ", "found 5"),
    cell("not there", "slurm.environment", "slurm/none.sh", "slurm.environment: found 'slurm/none.sh'", "shell file"),
    cell("a folder", "slurm.environment", "slurm/box", "slurm.environment: found 'slurm/box'"),
    cell("empty", "slurm.environment", "", "slurm.environment: found ''"),
    cell("a NUL", "slurm.environment", "a\0b", "slurm.environment: found 'a\\x00b'"),
    cell("unknown", "slurm.needs", ["acount"], "slurm.needs.0: ", "found 'acount'", "'account'"),
    cell("a text", "slurm.needs", "account", "slurm.needs: ", "found 'account'"),
    cell("0", "slurm.cores_per_rank", 0, "slurm.cores_per_rank: ", "found 0"),
    cell("-1", "slurm.memory_mb", -1, "slurm.memory_mb: ", "found -1"),
    cell("empty", "slurm.bins", [], "slurm.bins: ", "found []"),
    cell("a number", "slurm.bins", 5, "slurm.bins: ", "found 5"),
    cell("a number", "slurm.bins.0", 5, "slurm.bins.0: ", "found 5", "keys nodes"),
    cell("0", "slurm.bins.0.nodes", 0, "slurm.bins.0.nodes: ", "found 0"),
    cell("0", "slurm.bins.1.hours", 0, "slurm.bins.1.hours: ", "found 0"),
    cell("infinite", "slurm.bins.1.hours", float("inf"), "slurm.bins.1.hours: found '.inf'"),
    cell("beyond all time", "slurm.bins.1.hours", 1e300, "slurm.bins.1.hours: ", "found 1e+300"),
    cell("misspelt", "slurm.bins.1.hour", 1, "slurm.bins.1.hour: ", "nearest: hours"),
    cell("0", "slurm.running_jobs", 0, "slurm.running_jobs: ", "found 0"),
    cell("a trillion", "slurm.running_jobs", 10**12, "slurm.running_jobs: ", "found 1000000000000"),
    cell("a text", "slurm.queued_jobs", "90", "slurm.queued_jobs: ", "found '90'"),
    cell("unknown", "slurm.readers", "login", "slurm.readers: ", "found 'login'", "'driver', 'job'"),
]


@pytest.mark.parametrize("key, value, words", SLURM)
def test_a_platform(key, value, words, root):
    path = root / "config/platforms/cluster.yaml"
    change(path, key, value)
    refuses(lambda: config.load(platform="cluster"), ConfigError, path, *words)


GROUP = "groups.throughput"
REGISTRY = [
    cell("misspelt", "paper", {}, "paper: ", "known keys: papers", "nearest: papers"),
    cell("missing", "papers", GONE, "papers: Field required"),
    cell("a list", "papers", [], "papers: ", "found []"),
    cell("a number", "papers.ZT", 5, "papers.ZT: ", "found 5", "keys title"),
    cell("a number", "papers.ZT.id", 2501.04266, "papers.ZT.id: ", "found 2501.04266", "str"),
    cell("misspelt", "papers.ZT.tilte", "x", "papers.ZT.tilte: ", "nearest: title"),
    cell("a list", "scopes", [], "scopes: ", "found []"),
    cell("a text", "scopes.machine", "x", "scopes.machine: ", "found 'x'"),
    cell("misspelt", "scopes.machine.evidense", [], "scopes.machine.evidense: ", "nearest: evidence"),
    cell("a list", "groups", [], "groups: ", "found []"),
    cell("without claims", GROUP, {"unit": "s"}, f"{GROUP}.claims: Field required"),
    cell("a list", f"{GROUP}.claims", [], f"{GROUP}.claims: ", "found []"),
    cell("misspelt", f"{GROUP}.unti", "s", f"{GROUP}: found unti", "known keys: claims"),
    cell("a list", f"{GROUP}.claims.ZT-1", [], f"{GROUP}.claims.ZT-1: ", "found []"),
    cell("misspelt", f"{GROUP}.claims.ZT-1.titel", "x", "ZT-1: titel: ", "nearest: title"),
    cell("infinite", f"{GROUP}.tolerance", float("inf"), f"{GROUP}.tolerance: found '.inf'"),
    cell("nan", f"{GROUP}.claims.ZT-1.paper_value", float("nan"), "paper_value: found '.nan'"),
]


@pytest.mark.parametrize("key, value, words", REGISTRY)
def test_claims(key, value, words, root):
    path = root / "config/claims.yaml"
    assert document.read(path)
    change(path, key, value)
    refuses(lambda: document.read(path), ConfigError, path, *words)


def test_large_but_allowed_is_planned_in_seconds(root):
    """What the limits of the file allow: thousands of points, and the largest numbers of a queue."""
    change(root / "config/config.yaml", f"{GRID}.grid", {"seed": list(range(2000))})
    change(root / "config/platforms/cluster.yaml", "slurm.running_jobs", 10**6)
    change(root / "config/platforms/cluster.yaml", "slurm.bins", [{"nodes": 10**6, "hours": 10_000}])
    start = time.process_time()
    assert len(plan.make("laptop", "cluster").jobs) == 2 * 2000 + 2
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "grid, words",
    [
        row("a model beyond memory", {"hidden": 10**9}, "experiments.zero_train: ", "Storage size"),
        row(
            "heads that do not divide",
            {"heads": 10**9},
            "experiments.zero_train.tiers.smoke.0.grid: ",
            "not divisible by 1000000000 heads",
        ),
    ],
)
def test_points_beyond_what_predicts_them(grid, words, root):
    change(root / "config/config.yaml", "experiments", {"zero_train": {"tiers": {"smoke": [{"grid": grid}]}}})
    refuses(lambda: plan.make("smoke", "cluster"), ConfigError, "config.yaml: ", *words)


PAIRS = [
    row("no equals sign", ["gpus"], "--set gpus: expected key=value"),
    row("no key", ["=4"], "--set =4: expected key=value"),
    row("nothing", [""], "expected key=value"),
    row("a key twice", ["gpus=4", "gpus=8"], "gpus=8", "given twice"),
    row("an unknown key", ["gpu=4"], "--set: gpu: ", "nearest: gpus"),
    row("an option for a key", ["--out=x"], "--out"),
    row("a list", ["gpus=[4, 8]"], "gpus: ", "found [4, 8]", "int"),
    row("a mapping", ["gpus={a: 4}"], "gpus: ", "found a mapping"),
    row("a word", ["gpus=four"], "gpus: ", "found 'four'"),
    row("no value", ["gpus="], "gpus: ", "found ''"),
    row("null", ["gpus=null"], "gpus: ", "found None"),
    row("infinity", ["time_limit_s=.inf"], "--set time_limit_s", "found '.inf'"),
    row("not a number", ["time_limit_s=.nan"], "--set time_limit_s", "found '.nan'"),
    row("infinity as a word", ["time_limit_s=inf"], "time_limit_s: ", "'inf'"),
    row("beyond 64 bits", [f"seed={2**64}"], "--set seed", "64 bits"),
    row("5000 digits", [f"seed={'9' * 5000}"], "--set seed", "64 bits"),
    row("a negative seed", ["seed=-1"], "seed: ", "found -1"),
    row("a tag that runs code", ["seed=!!python/object/apply:os.system [touch P]"], "--set seed", "python/object"),
    row("a list that is not closed", ["gpus=["], "--set gpus", "not valid YAML"),
    row("a colon", ["gpus=a: b: c"], "--set gpus", "not valid YAML"),
    row("two documents", ["gpus=4\n--- 5"], "--set gpus", "not valid YAML"),
    row("5000 levels", ["gpus=" + "[" * 5000 + "]" * 5000], "--set gpus", "too many levels"),
    row("an undefined alias", ["gpus=[*a]"], "--set gpus", "undefined alias"),
    row("aliases", ["gpus=[&a [*a]]"], "--set gpus", "aliases"),
    row("a NUL", ["gpus=\0"], "--set gpus", "not valid YAML"),
    row("a byte that is not UTF-8", ["gpus=\udcff"], "--set gpus", "not valid YAML"),
    row("a date", ["gpus=2024-01-01"], "--set gpus", "timestamp"),
    row("a contradiction", ["gpus=5"], "gpus is 5"),
]


@pytest.mark.parametrize("pairs, words", PAIRS)
def test_pairs_that_are_refused(pairs, words):
    refuses(lambda: settings.point("exflow_placement", pairs), ValueError, *words)


@pytest.mark.parametrize(
    "pair, value",
    [
        pytest.param("records=results/a b", "results/a b", id="a path with a space"),
        pytest.param("a=b=c", "b=c", id="an equals sign in the value"),
        pytest.param("a='2024-01-01'", "2024-01-01", id="a date in quotes"),
        pytest.param("a=1_000", 1000, id="underscores"),
        pytest.param("a=", "", id="nothing"),
    ],
)
def test_pairs_that_are_taken(pair, value):
    assert settings.read([pair]) == {pair.partition("=")[0]: value}


def test_a_fifo_stops_a_command(root):
    (root / "config/platforms/laptop.yaml").unlink()
    os.mkfifo(root / "config/platforms/laptop.yaml")
    command_refuses(["reproduce"], root, "laptop.yaml", "ordinary file")


def test_the_small_files_are_right(root):
    """Else what is refused above might be refused for another reason."""
    found, _ = config.load(platform="cluster")
    assert found.platform == "cluster" and document.read(root / "config/claims.yaml")
    assert command(["schema", "config"], root).returncode == 0
