"""The shipped routing traces by name, and what is known of them without reading them."""

from collections.abc import Iterator
from typing import Literal

TraceName = Literal["gptoss20b", "gpt_moe_8e", "gpt_moe_16e", "gpt_moe_32e", "gpt_moe_64e", "gpt_moe_16e_shakespeare"]
ROUNDS = 30  # of every search for a placement: a record repeats exactly where its time limit does not cut it
ALL = "all"  # domains
DOMAINS = {"gptoss20b": (ALL, "mmlu", "mmlu_pro", "gpqa", "sorry_bench"), "gpt_moe": (ALL, "shakespeare", "python")}


def experts(name: TraceName) -> int:
    """Experts per layer of a trace."""
    return 32 if name == "gptoss20b" else int(name.split("_")[2].removesuffix("e"))


def domains(name: TraceName) -> tuple[str, ...]:
    """The domains of a trace."""
    return DOMAINS["gptoss20b" if name == "gptoss20b" else "gpt_moe"]


def unknown_domains(name: TraceName, **asked: str) -> Iterator[str]:
    """Complaints about fields that name a domain which the trace lacks."""
    for field, domain in asked.items():
        if domain not in domains(name):
            yield f"{field} is {domain!r}: {name} has {', '.join(domains(name))}"


def describe(name: TraceName, domain: str, top_k: int = 1) -> str:
    """For a record's conditions."""
    own = f"GPT-MoE with {experts(name)} experts" + (", trained on Shakespeare," if "shakespeare" in name else "")
    model = "gpt-oss-20b" if name == "gptoss20b" else own
    return f"{model} top-{top_k}, {'all domains' if domain == ALL else domain}"
