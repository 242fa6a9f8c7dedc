"""Without the packages of the extra an import names the extra; models that train and decode need none of them."""

import importlib
import subprocess
import sys

import pytest

EXTRA = ("pandas", "psutil", "scipy", "gguf", "jinja2", "tokenizers", "safetensors")


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("pandas", "repro.flover", "flover"),
        ("psutil", "repro.flover", "flover"),
        ("scipy", "repro.flover", "flover"),
        ("gguf", "repro.models.checkpoint", "flover"),
        ("jinja2", "repro.models.checkpoint", "flover"),
        ("tokenizers", "repro.models.checkpoint", "flover"),
        ("gguf", "repro.models.huggingface", "flover"),
        ("safetensors", "repro.models.huggingface", "flover"),
        ("safetensors", "repro.models.gpt_moe_checkpoint", "exflow"),
    ],
)
def test_an_import_names_the_extra_that_is_missing(monkeypatch, package, module, extra):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=f"{module} needs {package}: pip install 'repro-papers.{extra}.'"):
        importlib.import_module(module)


def test_models_need_no_extra():
    code = f"import sys; sys.modules.update(dict.fromkeys({EXTRA})); import repro.models.gpt, repro.models.llama"
    subprocess.run([sys.executable, "-c", code], check=True)
