"""llama.cpp through llama-cpp-python's low-level API: the loop of llama.cpp's own server, without HTTP.

Every call decodes one token of each running sequence together with the prompts of newcomers. (Named so that the package
`llama_cpp` can be imported beside it.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import protocol
from protocol import Answer, Event, Job, Request

BATCH = 2048  # most tokens of a call: a whole burst of prompts takes one or two


@dataclass
class Running:
    request: Request
    position: int  # next free position of its sequence
    ahead: list[int]  # tokens to process in the next call: the prompt, then the last token
    given: int = 0


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(job.gguf.encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise ValueError(f"{job.gguf}: llama.cpp cannot load it")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        parameters = llama_cpp.llama_context_default_params()
        self.most = job.sequences
        parameters.n_ctx = self.most * job.positions
        parameters.n_seq_max = self.most
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_threads = parameters.n_threads_batch = job.threads
        # One cache for all, as its server has: with one each, a call is cut wherever a sequence in between has ended,
        # and prompts of different length are processed apart (1.6 times the processor time here). Flash attention is on
        # by default.
        parameters.kv_unified = True
        # Its default cache is fp16. In fp32 that would round what nobody else rounds.
        kind = llama_cpp.GGML_TYPE_F32 if job.dtype == "float32" else llama_cpp.GGML_TYPE_F16
        parameters.type_k = parameters.type_v = kind
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        if not self.context:
            raise ValueError(f"{job.gguf}: llama.cpp makes no context of {parameters.n_ctx} positions")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.waiting: list[Request] = []
        self.running: dict[int, Running] = {}  # by sequence

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self, seconds: float) -> list[Event]:
        self.admit()
        order = self.fill()
        if status := llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: status {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (len(order), self.vocab))
        return [self.take(seq, int(token)) for seq, token in zip(order, logits.argmax(-1), strict=True)]

    def admit(self) -> None:
        """First come first served, as long as there is a free sequence and the prompt fits into this call."""
        free = [seq for seq in range(self.most) if seq not in self.running]
        room = BATCH - sum(len(running.ahead) for running in self.running.values())
        while free and self.waiting and len(self.waiting[0].prompt) <= room:
            request = self.waiting.pop(0)
            room -= len(request.prompt)
            self.running[free.pop(0)] = Running(request, 0, request.prompt)

    def fill(self) -> list[int]:
        """Write the call's tokens; returns the sequences in the order of their logits."""
        batch, n = self.batch, 0
        for seq, running in self.running.items():
            for token in running.ahead:
                batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, running.position, 1
                batch.seq_id[n][0], batch.logits[n] = seq, False
                running.position += 1
                n += 1
            batch.logits[n - 1] = True
        batch.n_tokens = n
        return list(self.running)

    def take(self, seq: int, token: int) -> Event:
        """The sequence's next token; its positions are freed with the last."""
        running = self.running[seq]
        running.ahead, running.given = [token], running.given + 1
        if done := running.given == running.request.output_tokens:
            del self.running[seq]
            llama_cpp.llama_memory_seq_rm(self.memory, seq, -1, -1)
        return Event(running.request.id, [token], done)


def start(job: Job) -> Callable[[Sequence[Request]], list[Answer]]:
    return partial(protocol.serve, LlamaCpp(job))


def version() -> str:
    core = next(Path(llama_cpp.__file__).parent.glob("lib/libllama.so.*.*.*")).name
    return f"{llama_cpp.__version__} ({core.removeprefix('libllama.so.')})"


if __name__ == "__main__":
    protocol.run(start, version)
