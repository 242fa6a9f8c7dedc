"""Byte fuzzing of every parser of files that a stranger may have written.

    python tests/attack/fuzz.py gguf --minutes 10

mutates valid files and reads them. A parser returns or raises what it documents, with the name of the file; anything
else is a finding: the input is kept and the command ends with exit code 1. Reading is done in a child process, so that
a crash or a hang is a finding as well.
"""

import argparse
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HANG = 30  # seconds for one input
ODD_INTEGERS = (0, 1, 2, *(2**bits + less for bits in (7, 8, 15, 16, 31, 32, 63) for less in (-1, 0)), 2**64 - 1)


@dataclass(frozen=True)
class Parser:
    """`seeds` writes valid files into a folder and gives their paths; `parse` reads one, and uses what it read where
    that is what bad contents would break; `refusals` is what it documents to raise."""

    seeds: Callable[[Path], Sequence[Path]]
    parse: Callable[[Path], object]
    refusals: tuple[type[Exception], ...]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with one to eight edits: bits, odd integers, runs that are cut, repeated, moved or replaced."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        # Headers are at the beginning (GGUF, safetensors) or at the end (Parquet, zip): half of the edits go there.
        start = chance.randrange(len(found) + 1)
        if chance.random() < 0.5:
            start = min(start, 256) if chance.random() < 0.5 else max(start, len(found) - 256)
        length = chance.choice((1, 2, 4, 8, 16, 64))
        kind = chance.randrange(7)
        if kind == 0 and start < len(found):
            found[start] ^= 1 << chance.randrange(8)
        elif kind == 1:
            value = chance.choice(ODD_INTEGERS)
            size = chance.choice((1, 2, 4, 8))
            found[start : start + size] = struct.pack("<Q", value % 256**size)[:size]
        elif kind == 2:
            del found[start : start + length]
        elif kind == 3:
            found[start:start] = found[start : start + length]
        elif kind == 4:
            found[start : start + length] = chance.randbytes(length)
        elif kind == 5:
            del found[start:]
        else:
            other = chance.randrange(len(found) + 1)
            found[start : start + length] = found[other : other + length]
    return bytes(found)


def survives(parser: Parser, path: Path) -> None:
    """Read `path`: whatever is raised beyond the documented refusals gets out, and so does a message without file."""
    try:
        parser.parse(path)
    except parser.refusals as refusal:
        assert path.name in str(refusal) or path.parent.name in str(refusal), f"does not name the file: {refusal}"


def _child(parser: Parser, seeds: list[bytes], path: Path, seed: int, until: float, count: Path) -> None:
    """Mutate and read until `until`; `path` holds the input that is being read, `count` how many there were."""
    chance = random.Random(seed)
    done = 0
    while time.monotonic() < until:
        path.write_bytes(mutated(chance.choice(seeds), chance))
        signal.alarm(HANG)
        survives(parser, path)
        signal.alarm(0)
        done += 1
        if done % 100 == 0:
            count.write_text(str(done))
    count.write_text(str(done))


def main() -> int:
    from attack.parsers import PARSERS

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parser", choices=PARSERS)
    arguments.add_argument("--minutes", type=float, default=10)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    parser = PARSERS[chosen.parser]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        files = parser.seeds(folder)
        seeds = [file.read_bytes() for file in files]
        path, count = folder / f"fuzzed{files[0].suffix}", folder / "count"
        child = os.fork()
        if not child:
            code = 1
            try:
                _child(parser, seeds, path, chosen.seed, time.monotonic() + 60 * chosen.minutes, count)
                code = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        done = count.read_text() if count.exists() else "fewer than 100"
        print(f"{chosen.parser}: {done} inputs in {chosen.minutes:g} minutes, seed {chosen.seed}")
        if status == 0:
            return 0
        kept = Path(f"fuzz-{chosen.parser}-{chosen.seed}{path.suffix}")
        shutil.copy(path, kept)
        how = signal.Signals(status).name if os.WIFSIGNALED(status) else "an undocumented error"
        print(f"ended by {how}; the input is {kept}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
