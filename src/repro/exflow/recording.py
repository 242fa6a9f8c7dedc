"""Record the routing of a live model: which experts every token chooses in every layer, and how strongly.

    with record_routing(model) as recording:
        model.generate(**inputs)
    recording.save("routing.npz")          # `exflow.load_trace` reads it
    placement = exflow.place(recording.counts(), gpus=8)

A server that re-places while it runs keeps no trace: its hook fills `RoutingCounts`.

Routers are those of Hugging Face transformers 5 (Mixtral, Qwen-MoE, OLMoE, DeepSeek, gpt-oss and others give (logits,
weights, experts)), the gate of `deepspeed.moe.MoE`, our own GPT-MoE's, and what `routers` and `choices` say.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.exflow.trace import Trace, transitions
from repro.files import replacing


def is_router(module: nn.Module) -> bool:
    """Whether the choices of a module can be recorded."""
    name = type(module).__name__
    return name.lower().endswith("topkrouter") or (name == "TopKGate" and hasattr(module, "wg"))


def check_routers(model: nn.Module) -> None:
    """ValueError where a block has `experts` and no known router beside them, though others have one: its layer would
    be left out, and all after it would have the wrong number."""
    modules = model.named_modules()
    blocks = [(name, block) for name, block in modules if isinstance(getattr(block, "experts", None), nn.Module)]
    unknown = [(name, block) for name, block in blocks if not any(map(is_router, block.children()))]
    if unknown and len(unknown) < len(blocks):
        name, block = unknown[0]
        beside = [type(child).__name__ for part, child in block.named_children() if part != "experts"]
        raise ValueError(
            f"{name}: {type(block).__name__} has experts and no known router, found {', '.join(beside) or 'nothing'} "
            f"beside them, as in {len(unknown)} of {len(blocks)} layers; allowed: a known one in each, or all of them "
            "given to `record_routing` as `routers`"
        )


# Of a call of a router, with its arguments and output: experts, integer [tokens, k], and their weights [tokens, k].
Choices = Callable[[nn.Module, tuple, Any], tuple[Tensor, Tensor]]


def _choices(router: nn.Module, args: tuple, output: Any) -> tuple[Tensor, Tensor]:
    """(experts [tokens, k], their weights [tokens, k]) of a call of a router. DeepSpeed's top-2 draws its second expert
    at random, so its combining weights [tokens, E, capacity] are what counts; where it dropped a token for lack of
    capacity, the most likely experts stand in."""
    if not hasattr(router, "wg"):
        if not isinstance(output, tuple) or len(output) != 3:
            found = f"{len(output)} values" if isinstance(output, tuple) else type(output).__name__
            raise ValueError(f"{type(router).__name__} gave {found}, not (logits, weights, experts): give `choices`")
        _, weights, experts = output
        return experts, weights
    combining: Tensor = output[1].float().sum(dim=2)
    weigh, k = cast(nn.Module, router.wg), cast(int, router.k)
    likely = weigh(args[0].float()).softmax(dim=-1)
    weights, experts = torch.where(combining > 0, combining, 1e-6 * likely).topk(k, dim=-1)
    return experts, weights


class Recording:
    """What `record_routing` gives, without the tokens that the attention mask leaves out, and those of rows that have
    ended. A call of the model without cached keys and values begins new sequences, one per row; a call with them goes on
    with those of the call before.
    """

    def __init__(
        self, model: nn.Module, routers: Sequence[nn.Module] | None = None, choices: Choices = _choices
    ) -> None:
        self.source, self._choices = type(model).__name__, choices
        if routers is None:
            check_routers(model)
            routers = [module for module in model.modules() if is_router(module)]
        self._routers = list(routers)
        self._names = list(inspect.signature(model.forward).parameters)  # of arguments by position
        if len(self._routers) < 2:
            raise ValueError(
                f"{self.source} has {len(self._routers)} routers that could be recorded, need at least 2: known are "
                "modules whose class ends in TopKRouter (transformers 5) and DeepSpeed's TopKGate; give others as `routers`"
            )
        sizes = {experts_of(router) for router in self._routers}
        if len(sizes) > 1:
            raise ValueError(f"{self.source} has layers of {sorted(sizes)} experts: need one number")
        (self.num_experts,) = sizes
        self._layers: list[tuple[Tensor, Tensor] | None] = []  # of the call that is under way
        self._present: np.ndarray | None = None  # bool [batch, tokens] of that call; None outside
        self._rows = np.empty(0, np.int64)  # sequence of each row of the batch
        self._ended = np.empty(0, bool)  # whether it has come to its end
        self._sequences = 0
        self._chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # experts, weights, sequence

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        values = (given.get("input_ids"), given.get("inputs_embeds"), *args, *kwargs.values())
        tokens = next((v for v in values if isinstance(v, Tensor) and v.dim() >= 2), None)
        if tokens is None:
            raise ValueError(f"{self.source} was called without a tensor [batch, tokens, ..]")
        batch, length = tokens.shape[:2]
        present = self._unpadded(given.get("attention_mask"), batch, length)
        cache = given.get("past_key_values")  # a transformers `Cache`, or a tuple of keys and values
        known = 0 if cache is None else cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)
        begins = not known or len(self._rows) != batch
        if begins:
            self._rows = np.arange(self._sequences, self._sequences + batch)
            self._sequences += batch
        if begins or length > 1:
            self._ended = np.zeros(batch, bool)
        elif tokens.dim() == 2:  # `generate` goes on with rows that have ended while others have not
            self._ended = self._ended | _ends(model, tokens[:, 0])
        self._present = present & ~self._ended[:, None]
        self._layers = [None] * len(self._routers)

    def _unpadded(self, mask: Any, batch: int, length: int) -> np.ndarray:
        """bool [batch, length]: the tokens of a call that are no padding."""
        if mask is None:
            return np.ones((batch, length), bool)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise ValueError(
                f"{self.source}: attention_mask is {found}, padding cannot be told from it; allowed: [batch, tokens so "
                "far] or None (`generate` with a static cache makes another: record with the default cache)"
            )
        return mask[:, -length:].bool().cpu().numpy()

    def _keep(self, layer: int, router: nn.Module, args: tuple, output: Any) -> None:
        if self._present is not None and self._layers[layer] is None:
            experts, weights = self._choices(router, args, output)
            weights = weights.detach()
            order = weights.argsort(dim=-1, descending=True, stable=True)
            self._layers[layer] = experts.gather(-1, order).cpu(), weights.gather(-1, order).half().cpu()

    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        present, self._present = self._present, None
        if present is None or None in self._layers:
            return  # a part of the model was called on its own
        experts, weights = (torch.stack(each, dim=1).numpy() for each in zip(*self._layers, strict=True))
        if len(experts) != present.size:
            raise ValueError(f"{self.source}: routers saw {len(experts)} tokens of a batch of {present.shape}")
        here = present.reshape(-1)
        chosen = self._checked(experts[here]).astype(np.uint8 if self.num_experts <= 256 else np.uint16)
        self._chunks.append((chosen, weights[here], np.repeat(self._rows, present.shape[1])[here]))

    def _checked(self, experts: np.ndarray) -> np.ndarray:
        """`experts`, [tokens, layers, k]; ValueError where one is none of the layer's, which the cast would wrap."""
        wrong = ((experts < 0) | (experts >= self.num_experts)).any(axis=(0, 2))
        if wrong.any():
            layer = int(wrong.argmax())
            low, high = experts[:, layer].min(), experts[:, layer].max()
            raise ValueError(
                f"{type(self._routers[layer]).__name__} of layer {layer} chose experts {low} to {high}, allowed: 0 to "
                f"{self.num_experts - 1} (give `choices` where a router has more)"
            )
        return experts

    def trace(self) -> Trace:
        """All recorded tokens, sequence after sequence. RuntimeError without any."""
        if not self._chunks:
            raise RuntimeError("no token was recorded")
        experts, weights, sequence = (np.concatenate(each) for each in zip(*self._chunks, strict=True))
        order = np.argsort(sequence, kind="stable")  # decoded tokens arrive row by row of a batch
        return Trace(experts[order], self.num_experts, sequence[order], self.source, weights[order])

    def counts(self) -> np.ndarray:
        """Transition counts, float64 [layers-1, E, E], as of the trace. RuntimeError when nothing was recorded."""
        return transitions(self.trace())

    def save(self, path: str | Path) -> None:
        """Write the trace as `.npz` that `load_trace` reads, with weights in float16. Whole or not at all.
        ValueError for another suffix, RuntimeError where nothing was recorded."""
        trace, path = self.trace(), Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"{path}: a recorded trace is written as .npz")
        assert trace.sequences is not None and trace.weights is not None
        _, lengths = np.unique(trace.sequences, return_counts=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(
                file, experts=trace.experts, weights=trace.weights, seq_len=lengths, num_experts=self.num_experts
            )


@contextmanager
def record_routing(
    model: nn.Module, routers: Sequence[nn.Module] | None = None, choices: Choices = _choices
) -> Iterator[Recording]:
    """Record every token that goes through `model` inside the `with`, training or inference, forward or `generate`.

    `routers`: the modules that choose, one for each MoE layer, in order, with `num_experts` or a `weight` of as many
    rows (None: all of a known kind); `choices`: what a call of one chose, a function of the router, its arguments and
    its output that gives (experts, integer [tokens, k], weights [tokens, k]). If a router is called several times in a
    call of the model, the first counts.

    The model is called with tokens or embeddings [batch, tokens, ..] first, and with `attention_mask` [batch, tokens so
    far] where there is padding. A row ends where its next token, alone, is an `eos_token_id` of the model's own
    `generation_config` (ends that only a call of `generate` names are not seen): what `generate` feeds it until the last
    row ends is left out, as is the end itself, which a row by itself never feeds. Nothing of the model changes, and its
    outputs are the same. Beam search reorders rows, so its sequences are not told apart.

    Raises ValueError for fewer than two routers, blocks of experts whose router is of no known kind where others are,
    layers with different numbers of experts, and, in a call, for a router whose output is none that is known, experts
    that a layer does not have, an `attention_mask` of another form (that of a static cache), arguments without a tensor
    [batch, tokens, ..], and routers that see another number of tokens than the model.
    """
    recording = Recording(model, routers, choices)
    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(recording._begin, with_kwargs=True))
        hooks.enter_context(model.register_forward_hook(recording._end))
        for layer, router in enumerate(recording._routers):
            hooks.enter_context(router.register_forward_hook(partial(recording._keep, layer)))
        yield recording


class RoutingCounts:
    """Loads and transitions of the tokens that one rank of a server routes, counted on `device` as they come.

    `add`, or what `hook(layer)` gives, is called with the choices of each layer in turn, 0 to layers - 1, as rows of
    the same tokens: in vLLM `module.router.set_capture_fn(counts.hook(layer))` for the MoE layers of the model. Batches
    that are interleaved layer by layer (two micro-batches that overlap) cannot be told apart: their loads are counted,
    their transitions are left out (`out_of_turn` rows since `clear`), or counted wrong where they are equally long. Rows
    with a negative id are padding. `group`: ranks whose counts `total` adds up, of a backend for CPU tensors, and used
    by nobody else at the same time (None: the default one, if there is any).
    """

    def __init__(
        self, layers: int, experts: int, device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self._k, self.out_of_turn = group, 0, 0
        self._loads = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        self._pairs = torch.zeros(layers - 1, experts, experts, dtype=torch.int64, device=device)
        self._before: tuple[int, Tensor] | None = None  # a layer, and the choices in it of the tokens that come next

    def hook(self, layer: int) -> Callable[[Tensor], None]:
        """A function of the experts, integer [tokens, k], that tokens choose in `layer`."""
        return partial(self.add, layer)

    def add(self, layer: int, experts: Tensor) -> None:
        """Count `experts`, integer [tokens, k]; only their loads where the layer before was another, or had other
        tokens: a server goes on. ValueError when k changed."""
        tokens, k = experts.shape
        if self._k not in (0, k):
            raise ValueError(f"layer {layer} has top-{k} routing, before it was top-{self._k}")
        self._k, experts = k, experts.long()
        real = (experts >= 0).all(dim=1)
        chosen = experts.clamp(min=0)
        once = real[:, None].expand(tokens, k).long()
        self._loads[layer].index_add_(0, chosen.flatten(), once.flatten())
        last, before = self._before or (layer, chosen)
        if layer and (last, len(before)) != (layer - 1, tokens):
            self.out_of_turn += tokens
        elif layer:
            pairs = before[:, :, None] * self._loads.shape[1] + chosen[:, None, :]
            weight = real[:, None].expand(tokens, k * k).long()
            self._pairs[layer - 1].view(-1).index_add_(0, pairs.flatten(), weight.flatten())
        self._before = layer, chosen

    def moved(self, experts: Tensor) -> None:
        """The next layer is called with other tokens, which chose `experts` in the one that was counted last."""
        assert self._before is not None, "no layer was counted"
        self._before = self._before[0], experts

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each expert, float64 [layers, E], and transition counts, float64 [layers-1, E, E], with the weight
        of `exflow.transitions`: of all ranks since `clear`, the same on each; all must call it together."""
        parts = [self._loads.flatten(), self._pairs.flatten()]
        flat = torch.cat(parts).cpu()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, group=self.group)
        loads, pairs = (each.double().numpy() for each in flat.split([len(part) for part in parts]))
        return loads.reshape(self._loads.shape), pairs.reshape(self._pairs.shape) / float(max(self._k, 1) ** 2)

    def agreed(self, found: np.ndarray) -> np.ndarray:
        """What the first rank of the group `found`, on all of them."""
        answer = torch.from_numpy(found)
        if dist.is_available() and dist.is_initialized():
            dist.broadcast(answer, group=self.group, group_src=0)
        return answer.numpy()

    def clear(self) -> None:
        """Begin to count anew."""
        self._loads.zero_()
        self._pairs.zero_()
        self.out_of_turn = 0


def _ends(model: nn.Module, tokens: Tensor) -> np.ndarray:
    """bool [batch]: which of `tokens`, integer [batch], end their sequence by the model's `generation_config`."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        return np.zeros(len(tokens), bool)
    return np.isin(tokens.cpu().numpy(), torch.as_tensor(ends).cpu().numpy())


def experts_of(router: nn.Module) -> int:
    """How many it chooses among: as it says, or as many as its weights have rows. ValueError where neither tells."""
    if hasattr(router, "num_experts"):
        return cast(int, router.num_experts)
    weight = getattr(getattr(router, "wg", router), "weight", None)
    if weight is None:
        raise ValueError(f"{type(router).__name__} has neither `num_experts` nor `weight` [experts, width]")
    return len(weight)
