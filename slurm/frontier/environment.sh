# Sourced by every job on Frontier before its ranks start. "OLCF" is docs.olcf.ornl.gov, "PyTorch on Frontier" unless another page is named;
# Isambard-AI, which has the same network, sets most of the FI_* alike (docs.isambard.ac.uk, NCCL).

# `module` is a function of the shell, which a job's sh may not have.
command -v module > /dev/null || . "${LMOD_PKG:-${MODULESHOME:-}}/init/sh"
# The compiler environment that the torch wheels for ROCm are built against, and RCCL's plugin for Slingshot, which sets FI_* by itself (OLCF).
module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 rccl-net-plugin craype-accel-amd-gfx90a
# Cray's libraries of the loaded modules, not those of the system's default (OLCF).
export LD_LIBRARY_PATH="${CRAY_LD_LIBRARY_PATH:-}:${LD_LIBRARY_PATH:-}"

# --- RCCL over Slingshot ---
unset MASTER_ADDR MASTER_PORT                  # those of a user's shell, which jobs inherit, would win over the job's own
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3  # the four NICs of a node; without it RCCL may choose the management network and hang (OLCF)
export GLOO_SOCKET_IFNAME=hsn0                 # gloo carries barriers and small objects, over one NIC
# Without its plugin RCCL would send over TCP and say nothing: so named, it refuses. Inside one node there is no network (OLCF).
nodes="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)"  # Snakemake's jobs have lost SLURM_NNODES
[ "$nodes" = 1 ] || export NCCL_NET=OFI
export NCCL_CROSS_NIC=1                        # rings may change NICs between nodes: all four are used (OLCF)
export NCCL_NET_GDR_LEVEL=PHB                  # NICs read GCD memory where both hang on one host bridge, as on Frontier (OLCF)
export FI_MR_CACHE_MONITOR=kdreg2              # "memhooks" deadlocks with torch's allocator (OLCF)
export FI_CXI_DEFAULT_CQ_SIZE=131072           # all-to-alls of hundreds of ranks overflow the default completion queue (OLCF)
export FI_CXI_DEFAULT_TX_SIZE=2048             # the same for sends under way (OLCF)
export FI_CXI_DISABLE_HOST_REGISTER=1          # no GPU registration of host buffers, which fails under many ranks (OLCF)
export FI_CXI_RX_MATCH_MODE=hybrid             # when the NIC's matching lists are full, match in software instead of failing (OLCF)
export HSA_FORCE_FINE_GRAIN_PCIE=1             # peers may write GCD memory over PCIe and Infinity Fabric (rocm.docs.amd.com, RCCL usage tips)

# --- MIOpen and Triton ---
export TMPDIR=/tmp  # in a folder that nodes share, timed points of all nodes would wait for one lock
# Their databases in $HOME would be locked by every rank of every node at once; /tmp is the node's own (OLCF).
export MIOPEN_USER_DB_PATH="/tmp/$USER-miopen-${SLURM_JOB_ID:-0}"
export MIOPEN_CUSTOM_CACHE_DIR="$MIOPEN_USER_DB_PATH"
export TRITON_CACHE_DIR="/tmp/$USER-triton-${SLURM_JOB_ID:-0}"

# --- the Python environment on the node's NVMe ---
# Hundreds of ranks that import torch from a shared file system take minutes; from the node's disk, seconds (OLCF, "Python at scale").
# REPRO_ENVIRONMENT: an archive made once by conda-pack, as docs/slurm.md says.
if [ -n "${REPRO_ENVIRONMENT:-}" ]; then
    staged="/mnt/bb/$USER/repro"
    sbcast --force --preserve "$REPRO_ENVIRONMENT" "/mnt/bb/$USER/environment.tar.gz"
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 sh -c 'mkdir -p "$1" && tar -xzf "$2" -C "$1" && "$1/bin/python" "$1/bin/conda-unpack"' sh "$staged" "/mnt/bb/$USER/environment.tar.gz"
    export REPRO_PYTHON="$staged/bin/python"
    export PYTHONPATH="$PWD/src"  # this package itself is not in the archive
fi
