"""Bytes that a rank sends, by the level of the link."""

from repro.topology import Topology


class Ledger:
    """Payload bytes that this rank sent, per level of the link that joins it to the receiver.

    Counts tensors only: not TCP/IP headers, and not scalars such as the gradient norm. On backends with collectives of
    their own, a ring is assumed. Sum over ranks for the traffic of a step.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self.sent = dict.fromkeys(topology.names, 0)

    def count(self, peer: int, nbytes: int) -> None:
        """Book `nbytes` sent to global rank `peer`."""
        if level := self.topology.level_between(self.rank, peer):
            self.sent[level] += nbytes

    def take(self) -> dict[str, int]:
        """Bytes per level since the last call, and start again from zero: call it once per step."""
        sent, self.sent = self.sent, dict.fromkeys(self.topology.names, 0)
        return sent
