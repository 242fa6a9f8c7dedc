"""The programs printed in the documents run as they stand; files, commands and names that they mention exist."""

import contextlib
import io
import json
import os
import pkgutil
import queue
import re
import shutil
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import build
from typer.main import get_command

from repro import cli, experiments, launch, paths, scaling, zero
from repro.claims import registry
from repro.cli import settings
from repro.flover import Engine, Request, Scheduler
from repro.models.gpt import GPT, GPTConfig
from repro.models.llama import Llama, LlamaConfig
from repro.plan import config
from repro.report import figures
from repro.scaling.network import network_of
from repro.topology import Level, Topology
from repro.zero import checkpoint

# docs/log.md tells what was; its files may be gone.
DOCUMENTS = sorted(
    {"README.md", *(path.relative_to(paths.root()).as_posix() for path in (paths.root() / "docs").rglob("*.md"))}
    - {"docs/log.md"}
)
DOCUMENTS += ["config/README.md", "data/README.md", "results/README.md"]
APPENDICES = ["docs/appendix/sc-ad-ae.tex", "docs/appendix/ctuning.tex"]
MAKEFILE = (paths.root() / "Makefile").read_text()
TABLES_START_AT = ["", "src/repro", "src/repro/exflow"]  # folders that the paths in the documents are relative to
ELSEWHERE = {"data/AzureLLMInferenceTrace_conv.csv"}  # in somebody else's repository


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_links_exist(document):
    text, folder = (paths.root() / document).read_text(), (paths.root() / document).parent
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert [link for link in links if not (folder / link).exists()] == []
    pattern = r"(?<![\w/.-])[a-z]\w*(?:/[\w.-]+)+\.(?:py|yaml|smk|ipynb|md|csv|sbatch)\b"
    named = [path for path in re.findall(pattern, text) if not re.search(r"\b(NAME|NOTEBOOK)\b", path)]
    made = re.findall(r"^`([^`]+)`, new\b", text, re.MULTILINE)  # by who follows the document
    starts = [folder, *(paths.root() / start for start in TABLES_START_AT)]
    assert [
        path for path in {*named} - {*made} - ELSEWHERE if not any((start / path).exists() for start in starts)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_places_in_pages_exist(document):
    here = paths.root() / document
    links = re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", here.read_text())
    wrong = [f"{page}#{place}" for page, place in links if place not in places(here.parent / page if page else here)]
    assert wrong == []


@cache
def places(page: Path) -> set[str]:
    """Where a link may lead in a page: its ids, and in Markdown its headings, as GitHub names them."""
    text = page.read_text()
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    if page.suffix != ".md":
        return ids
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads)
    return ids | {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("document", [*DOCUMENTS, *APPENDICES])
def test_commands_and_names_exist(document):
    shell, spans = commands(document)
    for name in re.findall(r"\brepro(?:\.[a-zA-Z_]\w*)+", spans):
        pkgutil.resolve_name(name)
    for line in re.findall(r"^(?:.*\$\()?repro (.*)", f"{shell}\n{spans}", re.MULTILINE):
        words, command = re.split("[#)]", line)[0].split(), get_command(cli.app)
        while words and hasattr(command, "commands") and words[0] != "--help":
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        options = {"--help"} | {option for parameter in command.params for option in parameter.opts}
        assert [word for word in words if re.match(r"--?[a-z]", word) and word not in options] == [], line


def commands(document: str) -> tuple[str, str]:
    """What a document prints as shell commands, and its other pieces of code, a line each."""
    text = (paths.root() / document).read_text()
    if document.endswith(".tex"):
        shell = re.findall(r"\\begin{verbatim}\n(.*?)\\end{verbatim}", text, re.DOTALL)
        spans = re.findall(r"\\texttt{((?:[^{}]|{[^{}]*})*)}", text)
        return "\n".join(shell), "\n".join(re.sub(r"\\allowbreak{}|[\\{}]", "", span) for span in spans)
    shell = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return "\n".join(shell), "\n".join(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


@pytest.mark.parametrize(
    "document", sorted({*DOCUMENTS, *APPENDICES} - {"docs/extending.md"})
)  # its own test runs all of it
def test_targets_and_claims_of_commands_exist(document):
    """What `make`, `snakemake`, `repro reproduce`, `repro figure` and `repro claims` are told to make or judge."""
    text = "\n".join(commands(document))
    targets = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
    assert {word for word in re.findall(r"\bmake ([a-z][a-z-]*)", text)} - targets == set()
    known = {
        *figures.FIGURES,
        *figures.NOTEBOOKS,
        *experiments.names(),
        "replot",
        "outdated",
        "FIGURE",
        "NOTEBOOK",
        "NAME",
    }
    options = r"(?: --\S*+(?: \S*[/=.]\S*+)*+)*+"  # of snakemake, with paths and settings
    asked = re.findall(rf"^(?:snakemake{options}|repro (?:reproduce|figure)) ([a-z]\w+)", text, re.MULTILINE)
    assert {*asked} - known == set()
    tiers = re.findall(r"--tier[ =](\w+)", text)
    assert {*tiers} - {*get_args(config.Tier), "TIER"} == set()
    for name, pairs in re.findall(r"^ *repro run ([a-z]\w*)((?: --set \S+)*)", text, re.MULTILINE):
        settings.point(name, re.findall(r"--set (\S+)", pairs))
    profiles = {*re.findall(r"--profile (\S+)", text)}
    assert [
        name for name in profiles if not (paths.root() / name / "config.yaml").exists() and "NAME" not in name
    ] == []
    ids = {claim.id for claim in registry.load()}
    for line in re.findall(r"^repro (?:claims|explain|reproduce)((?: [A-Z][\w.-]*)+)", text, re.MULTILINE):
        for word in set(line.split()) - {"ID"}:
            assert any(one.startswith(word) for one in ids), line


@pytest.mark.parametrize("document", APPENDICES)
def test_paths_of_an_appendix_exist(document):
    paths_said = re.findall(r"^[\w.-]+(?:/[\w.-]*)+$", commands(document)[1], re.MULTILINE)
    assert len(paths_said) > 5
    made = {"results/laptop-smoke/report.html"}  # by a run
    assert [path for path in {*paths_said} - made if not (paths.root() / path).exists()] == []


def program(document: str, holding: str) -> str:
    """The one Python block of a document that holds these words."""
    (found,) = [block for block in blocks(document) if holding in block]
    return found


def blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (paths.root() / document).read_text(), re.DOTALL)


def run_on_ranks(text: str, world: int, names: dict | None = None) -> list[dict]:
    """Run a program that makes its own process group, as torchrun would: what it printed and left, by rank. The ranks
    share an import of torch; torchrun itself is tests/launch's."""

    def run(rank: int, _: int) -> dict:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # `launch` sets the rest
        dist.barrier()  # nobody leaves before all are connected
        dist.destroy_process_group()
        left = dict(names or {})
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(text.replace("init_process_group()", 'init_process_group("gloo")'), left)  # also where there is a GPU
        return {"said": said.getvalue(), "report": left.get("report")}

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return launch.launch(run, world, timeout_s=200)


def test_training_on_two_ranks(tmp_path, monkeypatch):
    """Also by the plan of the line that is a comment."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # ranks are copies of this process: the same model
    tokens = torch.randint(0, 31, (2, 8))
    text = program("README.md", "ZeroOptimizer").replace("dist.get_world_size() // 8", "1, packages=1")
    for chosen in (text, text.replace("# plan =", "plan =")):
        model = GPT(GPTConfig(layers=1, hidden=16, heads=2, seq_len=8, vocab=31))
        run_on_ranks(chosen, 2, {"model": model, "batches": [(tokens, tokens)] * 3})
        assert checkpoint.steps("checkpoints") == [2]
        shutil.rmtree("checkpoints")


def test_going_on_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokens = torch.randint(0, 31, (2, 8))
    begin = (
        program("README.md", "ZeroOptimizer")
        .split("for step")[0]
        .replace("dist.get_world_size() // 8", "1, packages=1")
    )
    scheduled = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
    for saved in ([4], [4, 9]):
        model = GPT(GPTConfig(layers=1, hidden=16, heads=2, seq_len=8, vocab=31))
        names = {"model": model, "tokens": tokens, "targets": tokens}
        run_on_ranks(begin + scheduled + program("docs/zero.md", "load_state_dict"), 2, names)
        assert checkpoint.steps("checkpoints") == saved


def test_stored_weights_for_a_model_on_the_meta_device(tmp_path, monkeypatch):
    """What a checkpoint then holds are these weights, to the bit."""
    monkeypatch.chdir(tmp_path)
    config = GPTConfig(layers=1, hidden=16, heads=2, seq_len=8, vocab=31)
    stored = dict(GPT(config).state_dict())
    with torch.device("meta"):
        model = GPT(config)
    begin = "import torch.distributed as dist\nfrom repro import zero\nfrom repro.topology import frontier\n"
    begin += "dist.init_process_group()\nplan = zero.plan.hierarchical(frontier(nodes=1, packages=1))\n"
    text = begin + program("docs/zero.md", "named_modules") + 'zero.checkpoint.save("checkpoints", 0, optimizer)\n'
    run_on_ranks(text, 2, {"model": model, "stored": stored, "torch": torch})
    torch.testing.assert_close(checkpoint.consolidated("checkpoints"), stored, rtol=0, atol=0)


def test_decoding_on_four_ranks(monkeypatch):
    """With fewer rounds and tokens."""
    monkeypatch.chdir(paths.root())
    text = program("docs/exflow.md", "Decoder").replace("rounds=30", "rounds=1").replace("tokens=32", "tokens=8")
    said = [rank["said"].split(" ", 1)[1].split(" {")[0] for rank in run_on_ranks(text, 4)]
    assert len(set(said)) == 1 and len(eval(said[0])) == 8  # every rank says the same 8 bytes


def test_placing_the_experts_of_a_transformers_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = torch.arange(60).view(4, 15)
    names = {"model": build("Mixtral"), "inputs": {"input_ids": tokens}}
    before = names["model"](tokens).logits
    exec(program("README.md", "permute_experts").replace("max_new_tokens=200", "max_new_tokens=20"), names)
    assert (tmp_path / "reordered" / "config.json").exists()
    torch.testing.assert_close(names["model"](tokens).logits, before)


def test_placing_for_dispatch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(16), (200, 3, 1)), axis=2)[:, :, :2]
    np.savez(tmp_path / "routing.npz", experts=experts)
    exec(program("docs/exflow.md", "place_for_dispatch"), {})
    assert "Dispatch(gpus=" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"][0]) == 16 + 8


def test_predicting_a_real_model(capsys):
    names = {"model": Llama.random(LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, ffn=48, vocab=61))}
    exec(program("docs/flover.md", "Batches"), names)
    assert capsys.readouterr().out.count("all done after") == 3


def test_serving_a_real_model(capsys):
    exec(program("docs/flover.md", "smollm2_path"), {})
    said = capsys.readouterr().out
    ids = {line.split()[0] for line in said.splitlines() if line.split()[1:2] in (["stop"], ["length"])}
    assert "Paris" in said and ids >= {"0", "1"}


def test_a_server_of_ones_own():
    """Tokens that are sent one by one are those of the whole answer; a cancelled request gets what it has."""
    model = Llama.random(LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, ffn=48, vocab=61))
    requests = [Request(number, (number + 1, 5), max_new_tokens=200 if number == 2 else 7) for number in range(3)]
    alone = Engine(model, Scheduler(slots=4), capacity=256).serve(requests[:2])
    names: dict = {}
    exec(program("docs/flover.md", "def drive"), names)
    asked: queue.Queue = queue.Queue()
    parts: dict[int, list[list[int]]] = {number: [] for number in range(4)}
    reasons: dict[int, str | None] = {}

    def send(number: int, tokens: list[int], reason: str | None) -> None:
        parts[number].append(tokens)
        reasons[number] = reason
        if number == 2 and len(parts[2]) == 9:
            asked.put(("cancel", 2))
        if number == 2 and reason:
            asked.put(("end", None))

    for request in (*requests, replace(requests[0], id=3, max_new_tokens=1000)):
        asked.put(("submit", request))
    names["drive"](Engine(model, Scheduler(slots=4), capacity=256), asked, send)
    for answer in alone.generations:
        assert [token for part in parts[answer.request.id] for token in part] == answer.tokens
        assert len(parts[answer.request.id]) == 7
    assert (reasons[0], reasons[1], reasons[2]) == ("length", "length", "cancelled")
    assert reasons[3] is not None and reasons[3].startswith("refused: request 3: needs")


@pytest.fixture
def llama_folder(tmp_path, monkeypatch):
    """A small model in the folder that the documents name."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61, max_position_embeddings=1024)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "path" / "to" / "model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("llama_folder")
def test_serving_by_several_ranks():
    leader, follower = run_on_ranks(program("docs/flover.md", "Leader"), 2)
    assert [len(answer.tokens) for answer in leader["report"].generations] == [7, 7, 7]
    assert follower["report"] is None


@pytest.mark.usefixtures("llama_folder")
def test_serving_a_folder_of_transformers(capsys):
    exec(program("README.md", "load_huggingface"), {"torch": torch, "prompt": (5, 6, 7)})
    assert capsys.readouterr().out.startswith("0 [")


def test_chatting_with_a_folder_of_transformers(tmp_path, monkeypatch, capsys):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = transformers.Qwen2Tokenizer({text: i for i, text in enumerate([*letters, "<|im_end|>"])}, [])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "Qwen3-0.6B")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=1, intermediate_size=48, vocab_size=260)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(program("docs/flover.md", "AutoTokenizer"), names)
    assert tokenizer.decode(names["prompt"]) == "user: What is the capital of France?<|im_end|>"
    assert (
        names["answer"].tokens and capsys.readouterr().out.strip() == tokenizer.decode(names["answer"].tokens).strip()
    )


def test_predicting_a_machine(capsys):
    exec(program("README.md", "scaling.predict"), {})
    tflops, critical = capsys.readouterr().out.split()
    assert 20 < float(tflops) < 190 and critical in ("compute", "package", "node", "cluster")
    exec(program("docs/scaling.md", "scaling.predict("), {})
    assert capsys.readouterr().out.split()[-1] == "True"


def test_fitting_the_output_of_nccl_tests(tmp_path, monkeypatch, capsys):
    """Times of a made network of 8 and 16 GPUs a node, in the format of nccl-tests."""
    monkeypatch.chdir(tmp_path)
    network = network_of(Topology((Level("cluster", 16, 2e10, 1e-5),)))
    lines = [f"#  Rank {rank:2} Group  0 Pid  {rank} on  node{rank // 8} device  {rank % 8} GPU" for rank in range(16)]
    lines.append(
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong"
    )
    lines.append("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       ")
    for nbytes in (2**k for k in range(12, 28)):
        us = 1e6 * scaling.seconds("all_gather", nbytes, network, "ring")
        lines.append(
            f"{nbytes:12} {nbytes // 4:12}     float    none      -1 {us:9.2f}    1.00    1.00      0 {us:9.2f}    1.00    1.00      0"
        )
    (tmp_path / "all_gather_perf.txt").write_text("\n".join(lines) + "\n")
    names: dict = {}
    exec(program("docs/scaling.md", "measured_files"), names)
    assert "cluster.bytes_per_s.0" in capsys.readouterr().out
    assert names["network"].topology.mesh_shape == (48, 8)
    assert (names["step"].seconds > 0).all()


def test_predicting_steps_from_a_few_measured_ones():
    config, machine, larger = scaling.gpt(1e9), *(scaling.hardware("dgx-h100").machine(nodes) for nodes in (2, 8))
    plans = [zero.plan.named(name, machine.topology) for name in ("ddp", "zero3", "zeropp")]
    measured = [(plan, float(scaling.predict_step(plan, config, machine, accumulation=8).seconds)) for plan in plans]
    names = {"scaling": scaling, "config": config, "machine": machine, "measured": measured, "larger": larger}
    exec(program("docs/scaling.md", "calibrate"), names | {"other": zero.plan.named("mics", larger.topology)})


def test_what_would_have_to_be_true():
    exec(program("docs/scaling.md", "ladder.explain()"), {})


def test_judging_a_number_of_ones_own(capsys):
    exec(program("results/README.md", "verdict.judge"), {})
    assert "('reproduced', 'within the tolerance')" in capsys.readouterr().out


def test_every_program_is_run():
    """By a test above or in `tests/test_wheel.py`; vLLM's, by `tests/exflow/test_policy.py` on its interface."""
    found = {block for name in {*DOCUMENTS} - {"docs/extending.md"} for block in blocks(name)}  # that has its own test
    here = set(re.findall(r'program\("([^"]+)", "([^"]+)"\)', Path(__file__).read_text()))
    ran = {program(*where) for where in here}
    assert [block for block in found - ran if "vllm" not in block] == []


def test_readme_names_the_primary_claims():
    text = (paths.root() / "README.md").read_text()
    assert all(re.search(rf"{re.escape(one.id)}\b", text) for one in registry.load() if one.primary)
