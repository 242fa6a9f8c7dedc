"""Every parser of files, on mutated files: a fixed budget here, a larger one in `make test-all` (fuzz.py: as long as wanted)."""

import random
from pathlib import Path

import pytest
from attack.fuzz import mutated, survives
from attack.parsers import PARSERS

EXAMPLES, MANY = 60, 400


def inputs(name: str, folder: Path, count: int, seed: int) -> None:
    """Mutate valid files `count` times and read them; the file of a finding stays in `folder`."""
    parser = PARSERS[name]
    files = parser.seeds(folder)
    seeds = [file.read_bytes() for file in files]
    chance = random.Random(seed)
    path = folder / f"fuzzed{files[0].suffix}"
    for _ in range(count):
        path.write_bytes(mutated(chance.choice(seeds), chance))
        survives(parser, path)


@pytest.mark.parametrize("name", PARSERS)
def test_valid_files_are_read(name, tmp_path):
    for path in PARSERS[name].seeds(tmp_path):
        PARSERS[name].parse(path)


@pytest.mark.parametrize("name", PARSERS)
def test_mutated_files(name, tmp_path):
    inputs(name, tmp_path, EXAMPLES, seed=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PARSERS)
def test_many_mutated_files(name, tmp_path):
    inputs(name, tmp_path, MANY, seed=1)
