# Sourced by every job on a cluster of NVIDIA GPUs before its ranks start. Add the `module load` lines that yours needs.

# gloo carries barriers and small objects. It takes the address of the host's name, which often is the loopback's; so name the
# interface of the default route (torch.distributed documentation, "Choosing the network interface").
GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(PATH=$PATH:/usr/sbin:/sbin ip -oneline route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p;q' || true)}"
export GLOO_SOCKET_IFNAME
# NCCL finds InfiniBand by itself; over the same interface it only meets (NCCL documentation, NCCL_SOCKET_IFNAME).
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$GLOO_SOCKET_IFNAME}"
# A rank whose peer died is ended by NCCL's watchdog and does not wait for ever (torch.distributed documentation; the default, said here
# because typed causes depend on it).
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# Buffers of finished collectives go back to the allocator at once; recorded streams would keep gigabytes (NVIDIA Megatron-Bridge, Slurm guide).
export TORCH_NCCL_AVOID_RECORD_STREAMS=1
