"""What ranks tell their parent: a file with the content, of any size, and a short message that it is there."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RESULT, ERROR, WHERE = range(3)  # what a rank tells of, and the name of the file that holds it


@dataclass(frozen=True)
class Teller:
    """A rank's way to tell its parent something of any size: the file first, then a message that it is there."""

    rank: int
    folder: Path
    pipe: Connection

    def __call__(self, kind: int, content: bytes) -> None:
        (self.folder / f"{kind}-{self.rank}").write_bytes(content)
        self.pipe.send_bytes(bytes([kind]) + self.rank.to_bytes(4, "big"))  # short, so whole even if ranks tell at once


def hear(pipe: Connection, folder: Path) -> tuple[int, int, Any]:
    """(kind, rank, content) of the next message."""
    message = pipe.recv_bytes()
    kind, rank = message[0], int.from_bytes(message[1:], "big")
    return kind, rank, pickle.loads((folder / f"{kind}-{rank}").read_bytes())
