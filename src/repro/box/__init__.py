"""A Slurm cluster on one Linux machine, for root: real munge, slurmctld and one slurmd per node, each node in a network
namespace of its own.

    repro-ID-node1 .. nodeN   slurmd and what jobs start; they reach slurmctld over a bridge of the host (10.77.0.0/24)
    repro-ID-gcd-0 .. M       one per GCD, joined by the links of `repro.emulate.netns`, 16 : 4 : 1 as Frontier's
    /run/repro-boxes/0        configuration, sockets, state, logs; `down` removes it

Each user has a box for each checkout: the next is number 1, with 10.77.1.0/24 and other ports. Read `cluster` (what up,
down and status do), then `boxes` (whose a box is), `network`, `daemons` and `packages`. The files of `slurm/box/` are
Slurm's configuration. Beside /run and the names above it makes a bridge rbID with a link for each node, and /etc/slurm where there is none,
which goes with the last box. Inside a node, /etc/slurm and /etc/hosts are
the box's, by a mount that nobody else sees.
"""

from repro.box.cluster import Box, Settings, configuration, down, status, up
from repro.box.packages import BoxError

__all__ = ["Box", "BoxError", "Settings", "configuration", "down", "status", "up"]
