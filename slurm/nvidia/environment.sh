# Sourced by every job on a cluster of NVIDIA GPUs before its ranks start. Add the `module load` lines that yours needs.

# gloo carries barriers and small objects. It takes the address of the host's name, which often is the loopback's; so name the
# interface of the default route (torch.distributed documentation, "Choosing the network interface").
GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(PATH=$PATH:/usr/sbin:/sbin ip -oneline route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p;q' || true)}"
export GLOO_SOCKET_IFNAME
# NCCL finds InfiniBand by itself; over the same interface it only meets (NCCL documentation, NCCL_SOCKET_IFNAME).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}"
# Kernels that Triton compiles: $HOME is shared by all ranks of all nodes, /tmp is the node's own.
export TRITON_CACHE_DIR="/tmp/$USER-triton-${SLURM_JOB_ID:-0}"
