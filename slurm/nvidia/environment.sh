# Sourced by every job on a cluster of NVIDIA GPUs before its ranks start. Add the `module load` lines that yours needs, behind this one
# (`module` is a function of the shell, which a job's sh may not have):
#   command -v module > /dev/null || . "${LMOD_PKG:-$MODULESHOME}/init/sh"
# Where a module sets SLURM_CONF, export it here as well: Snakemake's jobs have lost it, and their srun finds no configuration.

unset MASTER_ADDR MASTER_PORT  # those of a user's shell, which jobs inherit, would win over the job's own
# gloo carries barriers and small objects. It takes the address of the host's name, which often is the loopback's; so name the
# interface of the default route (torch.distributed documentation, "Choosing the network interface").
GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(PATH=$PATH:/usr/sbin:/sbin ip -oneline route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p;q' || true)}"
: "${GLOO_SOCKET_IFNAME:?no default route on this node: export the name of the interface between nodes above this line}"
export GLOO_SOCKET_IFNAME  # exported only now: an empty one counts as none
# NCCL finds InfiniBand by itself; over this interface ranks only find each other (NCCL documentation, NCCL_SOCKET_IFNAME).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}"
# Kernels that Triton compiles: $HOME is shared by all ranks of all nodes, /tmp is the node's own. Jobs share the folder:
# Triton names what it compiles by a hash, so the next job finds it.
export TMPDIR=/tmp  # in a folder that nodes share, timed points of all nodes would wait for one lock
export TRITON_CACHE_DIR="/tmp/$USER-triton"
