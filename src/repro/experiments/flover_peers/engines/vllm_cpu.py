"""vLLM on the CPU, in process. Variants: `compiled` (Inductor, what vLLM does by default) and `eager`.

The environment comes from `repro.experiments.flover_peers.catalogue`: it must be set before Python starts.
"""

from collections.abc import Callable, Sequence
from functools import partial

import protocol
import vllm
from protocol import Answer, Event, Job, Request
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform

BLOCK = 128  # KV positions


class Vllm:
    def __init__(self, job: Job) -> None:
        arguments = EngineArgs(
            model=job.model,
            dtype=job.dtype,
            skip_tokenizer_init=True,
            max_model_len=job.positions,
            max_num_seqs=job.sequences,
            # The whole burst of prompts fits into one iteration; nothing is gained by cutting them.
            max_num_batched_tokens=4096,
            # Keys and values for these requests (and its empty block), not all that it would reserve by default: memory is
            # compared with engines that take what they need.
            block_size=BLOCK,
            num_gpu_blocks_override=job.sequences * -(-job.positions // BLOCK) + 1,
            enforce_eager=job.variant == "eager",
            enable_prefix_caching=False,  # the prompts are random: there is no prefix to find
            disable_log_stats=True,
        )
        self.engine = LLMEngine.from_engine_args(arguments)

    @property
    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def submit(self, request: Request) -> None:
        sampling = SamplingParams(
            max_tokens=request.output_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self.engine.add_request(str(request.id), {"prompt_token_ids": request.prompt}, sampling)

    def step(self, seconds: float) -> list[Event]:
        outputs = self.engine.step()
        return [Event(int(output.request_id), output.outputs[0].token_ids, output.finished) for output in outputs]


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    return partial(protocol.serve, Vllm(job))


def version() -> str:
    """With zentorch where vLLM uses it."""
    if type(current_platform).__name__ != "ZenCpuPlatform":
        return vllm.__version__
    import zentorch

    return f"{vllm.__version__}, zentorch {zentorch.__version__}"


if __name__ == "__main__":
    protocol.run(start, version)
