"""DeepSpeed's ZeRO-3 and ZeRO++ as baselines: its own code, on GPUs with its own kernels and on CPUs over gloo.

    zero3    weights, gradients, optimizer over all ranks
    zeropp   as zero3, with INT8 gathers of the weights (qwZ), secondary shards in the node for the backward (hpZ)
             and INT4 two-hop reductions of the gradients (qgZ)

DeepSpeed's private names are those in `PRIVATE` and those that `private` is asked for, as of 0.19.8. When one is gone, a
RuntimeError says which.

DeepSpeed keeps state per process, and ranks are forked:

- `prepare` in the parent, before the fork: a ZeRO-3 optimizer imports Inductor, which takes seconds. No import starts a
  thread or a process, so forking afterwards is safe; a rank that was not prepared works as well.
- DS_ACCELERATOR is read at the first import, LOCAL_SIZE (ranks per node, where there are no GPUs to count) at every
  use.
- The group of hpZ is made once and serves every later model, whatever that asks for: a process trains with one number
  of ranks per node, ValueError otherwise.

Step times of `zeropp` on CPUs say little about its network: qgZ needs 110 collectives for four transformer blocks, of
3 to 15 ms each with 8 ranks on 2 cores. Compare bytes, or what a slow network adds.

Known to be wrong in 0.19.8 and left as it is, because it is the baseline: qgZ sums over the ranks of a node and divides
only by the number of nodes, so the gradients of matrices come out `ranks per node` times too large beside those of
vectors, which are not quantised. Clipping notices (tests/baselines/test_deepspeed.py).
"""

import importlib
import importlib.metadata
import logging
import os
import pkgutil
import warnings
from typing import Any

import torch
from torch import nn

from repro.baselines import deepspeed_quantizer, trainer
from repro.topology import Topology
from repro.zero.buckets import blocks
from repro.zero.materialise import default_device, materialise

# Up to 1e9 elements DeepSpeed by default keeps gathered, and it spreads only tensors above 1e5: a smaller model is never
# partitioned during a step, and hpZ has nothing to do. With these at 0, such a model is treated like most of a large
# one: 2.0 times the model is gathered per micro-batch, as in the ZeRO paper, and not 0.9.
_KEEPING = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
_MAX_LIVE_PARAMETERS, _REDUCE_BUCKET_SIZE = 10**9, 5 * 10**8  # DeepSpeed's defaults, elements


class DeepSpeedTrainer(trainer.Trainer):
    """`model`: DeepSpeed's engine; `optimizer`: torch's AdamW, which the engine's ZeRO-3 optimizer wraps. As ZeRO-3
    does, every micro-batch reduces its gradients to the shards.

    In `held_bytes`, `optimizer` is fp32 masters and moments, `secondary` the shard of hpZ. Not counted: the bucket of
    gradients.
    """

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        # Told by hand, so that the number of micro-batches need not be known when the engine is built.
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss, scale_wrt_gas=False)

    def _count(self) -> dict[str, int]:
        zero, parameters = self.model.optimizer, list(self.model.module.parameters())
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "weights": trainer.nbytes(private(parameter, "ds_tensor") for parameter in parameters),
            "secondary": trainer.nbytes(private(parameter, "ds_secondary_tensor") for parameter in parameters),
            "gradients": trainer.nbytes([private(zero, "grad_partitions_flat_buffer")]),
            "optimizer": trainer.nbytes((*private(zero, "fp32_partitioned_groups_flat"), *states)),
        }

    def _update(self) -> None:
        self.model.step()


def zero3(model: nn.Module, topology: Topology, training: trainer.Training) -> DeepSpeedTrainer:
    """Shard `model` in place over all ranks of the default process group, which are those of `topology`.

    model       fp32; rank 0's weights are sent to all. On the meta device: every rank makes one block after the other
                real
    training    with torch's AdamW: DeepSpeed's own Adam for CPUs is compiled on first use, for 96 s

    A model of less than 1e9 parameters is partitioned all the time, and the members of its `nn.ModuleList`s are
    gathered one at a time, as FSDP2 and our engine do: a step then takes half the time. A larger one has DeepSpeed's
    defaults.

    Raises ValueError for a model, topology or dtype that does not fit, ImportError without DeepSpeed, RuntimeError for
    a version whose inside is another.
    """
    return _initialize(model, topology, training, {})


def zeropp(model: nn.Module, topology: Topology, training: trainer.Training) -> DeepSpeedTrainer:
    """Arguments and errors of `zero3`. Also ValueError unless there are several nodes of several ranks, and for a model
    with a tensor that qgZ would reduce wrongly; qwZ needs shards of a multiple of 8 elements, and DeepSpeed says so in
    the first step.

    Gradients travel as fp16, whatever the dtype: the kernels read what they get as fp16 without looking at its type.
    """
    _, ranks = trainer.nodes_and_ranks(topology)
    _check_reducible(model, topology.world_size)
    set_up_process(topology)
    from deepspeed.accelerator import get_accelerator

    if (devices := get_accelerator().device_count()) != ranks:
        raise ValueError(f"qgZ would build nodes of {devices} ranks, the devices that this process sees, not {ranks}")
    switches = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": ranks}
    return _initialize(model, topology, training, switches, communication_data_type="fp16")


def _check_reducible(model: nn.Module, world_size: int) -> None:
    """qgZ cuts a tensor of two dimensions or more into max(rows, columns, ranks) groups and deals whole groups to
    ranks, 8 values at a time. (A tensor whose size cannot be dealt to the ranks is reduced without quantisation.)"""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or parameter.numel() % (2 * world_size):
            continue
        groups = max(*parameter.shape[:2], world_size)
        if groups % world_size or parameter.numel() % (8 * groups):
            raise ValueError(
                f"parameter {name}: qgZ cuts {tuple(parameter.shape)} into {groups} groups, which must be divisible "
                f"by {world_size} ranks and hold a multiple of 8 values each"
            )


def _initialize(
    model: nn.Module, topology: Topology, training: trainer.Training, switches: dict[str, Any], **more: Any
) -> DeepSpeedTrainer:
    """`switches`: in the section `zero_optimization` of DeepSpeed's configuration; `more`: beside it."""
    trainer.check(model, topology, training.dtype)
    set_up_process(topology)
    import deepspeed

    if torch.cuda.is_available():  # it takes this number for the device's, which where a rank sees one GPU only is 0
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # A larger bucket than the model has no effect but that its memory is allocated: a gigabyte per rank.
    zero = {"stage": 3, "reduce_bucket_size": min(_REDUCE_BUCKET_SIZE, parameters)} | switches
    if parameters < _MAX_LIVE_PARAMETERS:
        zero |= dict.fromkeys(_KEEPING, 0)
        if whole := blocks(model):
            deepspeed.utils.set_z3_leaf_modules(model, list({type(block) for block in whole}))
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required; only its throughput reports use it
        "gradient_clipping": training.max_grad_norm or 0.0,
        "bf16": {"enabled": training.dtype == torch.bfloat16},
        "zero_optimization": zero,
        "steps_per_print": None,
        **more,
    }
    if any(parameter.is_meta for parameter in model.parameters()):
        _materialise(model, training, config)
    # The optimizer is built here and not by DeepSpeed, which would take its own, compiled one.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, **training.adamw)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return DeepSpeedTrainer(engine, engine.optimizer.optimizer, engine.device)


def _materialise(model: nn.Module, training: trainer.Training, config: dict[str, Any]) -> None:
    """Make a model on the meta device real and spread it, one block after the other: a rank never holds it whole."""
    import deepspeed

    device, group = default_device(model), None
    node_group = private("deepspeed.utils.groups", "_get_zero_param_intra_parallel_group")
    for module in (*blocks(model), model):
        materialise(module, device, training.init)
        module.to(training.dtype)  # before it is spread, as DeepSpeed does with a model that is real
        if "zero_hpz_partition_size" in config["zero_optimization"]:
            group = node_group()  # None the first time: Init makes it, and would refuse to make it twice
        deepspeed.zero.Init(
            module=module, config_dict_or_path=config, dtype=training.dtype, zero_param_parallel_group=group
        )


# --- what is set once per process ----------------------------------------------------------------------------------

PRIVATE = {  # module or class, and the name in it that is replaced or (None) only imported
    "deepspeed.comm.torch": "build_shm_op",
    "deepspeed.runtime.zero.partition_parameters:CUDAQuantizer": "quantizer_cuda_module",
    "deepspeed.runtime.comm.coalesced_collectives": "quantizer_module",
    "deepspeed.runtime.zero.muon.muon_optimizer": None,
}

_ranks_per_node: int | None = None  # of this process, once it is set up


def prepare() -> None:
    """Import DeepSpeed and its later imports: for a parent, before it forks ranks. ImportError without DeepSpeed."""
    if not torch.cuda.is_available():
        # It would find the CPU itself, after a warning; but on a Mac it would take the GPU, which gloo does not serve.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ImportError("the DeepSpeed baselines need their extra: pip install 'repro[deepspeed]'") from error
    for place, name in PRIVATE.items():
        private(place, name)


def set_up_process(topology: Topology) -> None:
    """Environment, replacements, log level and communication of this rank, at the first call."""
    global _ranks_per_node
    prepare()
    from deepspeed.accelerator import get_accelerator

    ranks = topology.world_size // topology.levels[-1].size
    if _ranks_per_node is None:
        if get_accelerator().device_name() == "cpu":
            os.environ["LOCAL_SIZE"] = str(ranks)
            # Shared-memory collectives: compiled on first use (50 s), and they would bypass an emulated network.
            _replace("deepspeed.comm.torch", lambda: None)
            _replace("deepspeed.runtime.zero.partition_parameters:CUDAQuantizer", deepspeed_quantizer)
            _replace("deepspeed.runtime.comm.coalesced_collectives", deepspeed_quantizer)
        # A line per tensor and step where qgZ falls back; and DeepSpeed calls torch's collectives by their old names.
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        importlib.import_module("deepspeed.comm").init_distributed(dist_init_required=False)
        _ranks_per_node = ranks
    if ranks != _ranks_per_node:
        raise ValueError(f"this process has trained with {_ranks_per_node} ranks per node, and cannot with {ranks}")


def _replace(place: str, value: Any) -> None:
    setattr(private(place), PRIVATE[place], value)


def private(owner: Any, name: str | None = None) -> Any:
    """`name` of an object of DeepSpeed, or of a `module` or `module:class` of it; without a name that itself.
    RuntimeError where it is gone."""
    try:
        # With a colon, a module whose own imports fail says so.
        found = pkgutil.resolve_name(owner if ":" in owner else f"{owner}:") if isinstance(owner, str) else owner
        return getattr(found, name) if name else found
    except (ModuleNotFoundError, AttributeError) as error:
        where = owner if isinstance(owner, str) else type(owner).__name__
        version = importlib.metadata.version("deepspeed")
        place = f"{where}.{name}" if name else f"module {where}"
        raise RuntimeError(
            f"DeepSpeed {version} has no {place}; repro.baselines.deepspeed was written for 0.19.8"
        ) from error
