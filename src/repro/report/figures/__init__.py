"""Every figure: the notebook that tells its story, the experiments it reads, the claims it shows.

A figure is the function of its name in the module of its notebook (`zero_bytes` in `repro.report.figures.zero`);
`base.draw` draws it. This table is light: who asks it what a figure needs loads no plotting library.
"""

from dataclasses import dataclass

from repro import experiments


@dataclass(frozen=True)
class Entry:
    """`reads`: ids of experiments, whose records the figure shows. `claims`: ids of claims that it is evidence for."""

    notebook: str
    reads: tuple[str, ...]
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notebook:
    """`title` of what it is about; `paper`: the number at arXiv of the paper, where it is about one."""

    title: str
    paper: str = ""


NOTEBOOKS = {
    "claims": Notebook("Verdicts"),
    "zero": Notebook("Hierarchical ZeRO++", "2501.04266"),
    "exflow": Notebook("ExFlow", "2401.08383"),
    "flover": Notebook("Flover", "2305.13484"),
    "scaling": Notebook("The papers' sizes, predicted"),
}

FIGURES = {
    "claims_overview": Entry("claims", tuple(experiments.names())),  # whatever a claim may ask for
    "zero_loss": Entry("zero", ("zero_train",), ("ZT-3.a", "ZT-3.b")),
    "zero_bytes": Entry("zero", ("zero_train",), ("ZP-1.a", "ZP-1.b", "ZP-1.c", "ZP-1.d")),
    "zero_step_time": Entry("zero", ("zero_train",), ("ZT-1.a", "ZT-1.b", "ZT-1.c", "ZT-1.d", "ZT-5.a")),
    "zero_rates": Entry("zero", ("zero_train",), ("ZT-5.c",)),
    "zero_levels": Entry("zero", ("zero_train",), ("ZT-5.b",)),
    "zero_scaling": Entry("zero", ("zero_train",), ("ZT-2.a",)),
    "zero_memory": Entry("zero", ("zero_train",), ("ZT-4.a", "ZT-4.b", "ZT-4.c")),
    "zero_prediction": Entry("zero", ("zero_train",)),
    "zero_choice": Entry("zero", ("zero_plan",)),
    "exflow_routing": Entry("exflow", ("exflow_affinity",), ("EX-F2.a",)),
    "exflow_hops": Entry(
        "exflow", ("exflow_placement",), ("EX-ILP.a", "EX-ILP.b", "EX-F8.a", "EX-F8.b", "EX-F8.d", "EX-F8.e")
    ),
    "exflow_load": Entry("exflow", ("exflow_placement",)),
    "exflow_copies": Entry("exflow", ("exflow_serving",)),
    "exflow_tokens": Entry("exflow", ("exflow_placement",), ("EX-ILP.c",)),
    "exflow_domains": Entry(
        "exflow", ("exflow_placement",), ("EX-ILP.d", "EX-ILP.e", "EX-ILP.f", "EX-ILP.g", "EX-ILP.j")
    ),
    "exflow_training": Entry("exflow", ("moe_train",), ("EX-F12.a", "EX-F12.b")),
    "exflow_decode": Entry(
        "exflow", ("moe_decode",), ("EX-T1.a", "EX-T1.b", "EX-E2E.a", "EX-E2E.b", "EX-E2E.e", "EX-E2E.f")
    ),
    "flover_latency": Entry("flover", ("flover_serving",), ("FL-F4c",)),
    "flover_throughput": Entry("flover", ("flover_serving",), ("FL-F4a.i",)),
    "flover_timeline": Entry("flover", ("flover_serving",)),
    "flover_requests": Entry("flover", ("flover_serving",)),
    "flover_windows": Entry("flover", ("flover_serving",), ("FL-F4a.j", "FL-PROG.c", "FL-PROG.d")),
    "flover_layouts": Entry("flover", ("flover_serving",), ("FL-MS.a", "FL-MS.b", "FL-MS.c")),
    "flover_ranks": Entry("flover", ("flover_parallel",), ("FL-MS.d", "FL-TP.a", "FL-TP.b")),
    "flover_model": Entry(
        "flover",
        ("flover_queue",),
        (*(f"FL-F4a.{part}" for part in "efgh"), *(f"FL-F8.{part}" for part in "abcdef")),
    ),
    "scaling_validation": Entry("scaling", ("scaling_network", "fabric_probe", "scaling_step")),
    "scaling_plans": Entry("scaling", ("scaling_step",)),
    "scaling_gcds": Entry("scaling", ("scaling_train",)),
    "scaling_ratios": Entry("scaling", ("scaling_train",)),
    "scaling_changes": Entry("scaling", ("scaling_train",)),
    "scaling_tornado": Entry("scaling", ("scaling_train",)),
    "scaling_networks": Entry("scaling", ("scaling_map",)),
    "scaling_models": Entry("scaling", ("scaling_map",)),
    "scaling_experts": Entry("scaling", ("scaling_decode",)),
    "scaling_requests": Entry("scaling", ("scaling_serving",)),
}


def of_notebook(notebook: str) -> list[str]:
    """Names of a notebook's figures, in their order there."""
    return [name for name, entry in FIGURES.items() if entry.notebook == notebook]


def entry(name: str) -> Entry:
    """A figure's row of the table; ValueError lists the known ones."""
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}, known: {', '.join(FIGURES)}")
    return FIGURES[name]
