"""Rows reach whom they concern, and what crosses a link is counted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.comm import Communicator, Hop
from repro.comm.row_exchange import RowExchange, pack, unpack
from repro.launch import launch
from repro.topology import Level, Topology, frontier

RANKS = 8
TOPOLOGY = Topology((Level("package", 2), Level("node", 2), Level("cluster", 2)))


@given(
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_packed_rows_come_out_as_they_went_in(n, width, labels, dtype):
    values = torch.randn(n, width).to(dtype)
    integers = torch.randint(-(2**31), 2**31, (n, labels))
    rows = pack(values, integers)
    assert rows.shape == (n, width * dtype.itemsize + 4 * labels)
    for back, sent in zip(unpack(rows, dtype, labels), (values, integers), strict=True):
        assert torch.equal(back, sent) and back.dtype == sent.dtype


def counts_of(rank):
    """Rows that `rank` has for each rank; rank 3 has none for anybody, and nobody has any for rank 5."""
    draw = torch.Generator().manual_seed(rank)
    counts = torch.randint(0, 4, (RANKS,), generator=draw) * (rank != 3)
    counts[5] = 0
    return counts


def rows_of(rank):
    """Bytes: sender, receiver, number."""
    return torch.tensor(
        [[rank, to, number] for to, count in enumerate(counts_of(rank).tolist()) for number in range(count)],
        dtype=torch.uint8,
    ).view(-1, 3)


def exchange(rank, world_size):
    communicator = Communicator(TOPOLOGY)
    rows = RowExchange(communicator)
    delivered, coming = rows.deliver(rows_of(rank), counts_of(rank), 3)
    sent = communicator.ledger.take()
    back = rows.all_to_all(delivered, coming, counts_of(rank).tolist())
    answered = communicator.ledger.take()
    return delivered, coming, back, rows.all_gather(rows_of(rank)), sent, answered, communicator.ledger.take()


@pytest.fixture(scope="module")
def ranks():
    return launch(exchange, RANKS, timeout_s=60)


def test_rows_are_delivered_in_the_order_of_their_senders(ranks):
    for rank, (delivered, coming, *_) in enumerate(ranks):
        assert coming == [int(counts_of(sender)[rank]) for sender in range(RANKS)]
        expected = torch.cat([rows[rows[:, 1] == rank] for rows in map(rows_of, range(RANKS))])
        assert torch.equal(delivered, expected)


def test_answers_return_in_the_order_of_the_questions(ranks):
    for rank, (_, _, back, *_) in enumerate(ranks):
        assert torch.equal(back, rows_of(rank))


def test_everybody_gets_all_rows_in_rank_order(ranks):
    for _, _, _, gathered, *_ in ranks:
        assert torch.equal(gathered, torch.cat([rows_of(rank) for rank in range(RANKS)]))


def test_the_ledger_counts_what_crosses(ranks):
    sent, answered, gathered = (
        {name: sum(r[at][name] for r in ranks) for name in TOPOLOGY.names} for at in (-3, -2, -1)
    )
    crossing = dict.fromkeys(TOPOLOGY.names, 0)
    for rank in range(RANKS):
        for to, count in enumerate(counts_of(rank).tolist()):
            if level := TOPOLOGY.level_between(rank, to):
                crossing[level] += 3 * count
    pairs = {"package": 8, "node": 16, "cluster": 32}
    assert sent == {name: crossing[name] + 8 * pairs[name] for name in pairs}  # a header in each message
    assert answered == crossing
    total = 3 * sum(int(counts_of(rank).sum()) for rank in range(RANKS))
    assert gathered["cluster"] == total + 8 * pairs["cluster"]  # each row crosses once between the two nodes
    assert gathered["package"] == 4 * total + 8 * pairs["package"]  # and into each of the four packages' other halves


def exchange_strided(rank, world_size, native):
    """A row for each rank, of 2 x 3 floats that are not in one piece."""
    if native:
        Hop.native = property(lambda hop: True)
    communicator = Communicator(frontier(1, 1, 2))
    rows = (torch.arange(12.0).view(3, 2, 2) + 100 * rank).transpose(0, 2)
    return RowExchange(communicator).all_to_all(rows, [1, 1], [1, 1]), communicator.ledger.take()["package"]


@pytest.mark.parametrize("native", [False, True])
def test_rows_may_be_strided_and_of_several_dimensions(native):
    sent = [(torch.arange(12.0).view(3, 2, 2) + 100 * rank).transpose(0, 2) for rank in range(2)]
    for rank, (came, nbytes) in enumerate(launch(exchange_strided, 2, native, timeout_s=60)):
        assert torch.equal(came, torch.stack([rows[rank] for rows in sent])) and nbytes == 24
