"""transformers, its own continuous batching: paged keys and values, a scheduler in a thread of its own."""

from collections.abc import Callable, Sequence
from functools import partial

import protocol
import torch
import transformers
from protocol import Answer, Event, Job, Request
from transformers import ContinuousBatchingConfig, GenerationConfig

NEVER = -1  # as end-of-sequence token: no token has this number


class Continuous:
    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        model = transformers.LlamaForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype))
        model.eval()
        model.set_attn_implementation("paged|sdpa")  # the only fast one without a GPU: flash attention needs one
        page = 32
        config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=job.sequences * (job.positions // page + 1),
            max_batch_tokens=256,
            max_requests_per_batch=job.sequences,
            allow_block_sharing=False,  # the prompts are random: there is no prefix to share
        )
        generation = GenerationConfig(max_new_tokens=job.positions, do_sample=False, eos_token_id=NEVER, pad_token_id=0)
        self.manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
        self.manager.start()
        self.told: dict[str, int] = {}  # tokens seen so far, by the id of a request that runs

    @property
    def busy(self) -> bool:
        return bool(self.told)

    def submit(self, request: Request) -> None:
        name = str(request.id)
        self.told[name] = 0
        if (
            self.manager.add_request(
                request.prompt, name, max_new_tokens=request.output_tokens, eos_token_id=NEVER, streaming=True
            )
            is None
        ):
            raise RuntimeError(f"request {name} was refused")

    def step(self, seconds: float) -> list[Event]:
        """The next output of the thread."""
        output = self.manager.get_result(timeout=seconds)
        if output is None:
            if not self.manager.is_running():
                raise RuntimeError("the thread of the scheduler has ended")
            return []
        if output.error:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
        new = output.generated_tokens[self.told[output.request_id] :]
        self.told[output.request_id] += len(new)
        if output.is_finished():
            del self.told[output.request_id]
        return [Event(int(output.request_id), new, output.is_finished())]


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    return partial(protocol.serve, Continuous(job))


if __name__ == "__main__":
    protocol.run(start, lambda: transformers.__version__)
