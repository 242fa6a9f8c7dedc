"""Recipes of containers: what they copy exists, and their shell commands parse. They are built where a program for that
and the base image can be had."""

import json
import os
import re
import shutil
import subprocess

import pytest

from repro import paths

ROOT = paths.root()
CONTAINERFILE = (ROOT / "Containerfile").read_text()
APPTAINER = (ROOT / "apptainer.def").read_text()


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Containerfile with its words, comments left out and lines joined."""
    lines = [line for line in CONTAINERFILE.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.strip().partition(" ") for line in joined) if word]


def sections() -> dict[str, str]:
    """The sections of the Apptainer definition; that before the first is the header."""
    parts = re.split(r"^%(\w+)$", APPTAINER, flags=re.MULTILINE)
    return {"header": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def installed(text: str) -> set[str]:
    """Debian's packages that a shell text installs."""
    found = re.findall(r"apt-get install([^&;>\n]*)", text.replace("\\\n", " "))
    return {word for words in found for word in words.split() if not word.startswith("-")}


def shells() -> dict[str, str]:
    found = {f"Containerfile RUN {n}": rest for n, (word, rest) in enumerate(instructions()) if word == "RUN"}
    found |= {f"apptainer.def %{name}": sections()[name] for name in ("post", "environment", "runscript")}
    found["postBuild"] = (ROOT / ".binder/postBuild").read_text()
    return found | {"devcontainer.json": devcontainer()["postCreateCommand"]}


def devcontainer() -> dict:
    return json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())


@pytest.mark.parametrize("name", shells())
def test_shell_commands_parse(name):
    done = subprocess.run(["sh", "-n"], input=shells()[name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_instructions_are_known_and_what_they_copy_exists():
    words = [word for word, _ in instructions()]
    assert set(words) == {"FROM", "RUN", "USER", "WORKDIR", "COPY", "ARG", "ENV", "CMD"} and words[0] == "FROM"
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            assert sources and all((ROOT / source).exists() for source in sources)
        if word == "CMD":
            assert all(isinstance(part, str) for part in json.loads(rest))
    assert all((ROOT / line.split()[0]).exists() for line in sections()["files"].split("\n") if line.strip())


def test_both_begin_with_one_release_and_install_packages_of_ci():
    base = dict(instructions())["FROM"]
    assert re.fullmatch(r"debian:\d+\.\d+-slim", base)
    assert f"From: {base}\n" in sections()["header"]
    assert installed(CONTAINERFILE) == installed(APPTAINER)
    assert installed(CONTAINERFILE) - {"ca-certificates"} < installed((ROOT / ".ci/run").read_text())


def test_all_make_the_environment_of_make():
    for name, text in {"Containerfile": CONTAINERFILE, "apptainer.def": APPTAINER, "postBuild": shells()["postBuild"]}.items():  # fmt: skip
        assert len(re.findall(r"make environment TORCH_INDEX=", text)) == 1, name
        assert "pip" not in re.sub(r"#.*", "", text), name


def test_the_image_s_copy_is_whole_or_not_there(tmp_path):
    image, here = tmp_path / "image", tmp_path / "here"
    for folder in (image / "src", image / ".git", image / ".venv", here, tmp_path / "bin"):
        folder.mkdir(parents=True)
    (image / "Makefile").touch()
    script = sections()["runscript"].replace("/opt/repro", str(image))
    cp = tmp_path / "bin/cp"  # is interrupted
    cp.write_text('#!/bin/sh\nfor folder; do :; done; touch "$folder/half"; exit 1\n')
    cp.chmod(0o755)

    def call():
        path = f"{cp.parent}:{os.environ['PATH']}"
        return subprocess.run(["sh", "-c", script, "sh", "ls", "-A"], cwd=here, env={"PATH": path}, text=True, capture_output=True)  # fmt: skip

    assert call().returncode and not (here / "repro").exists()
    cp.unlink()
    assert [call().stdout.split() for _ in range(2)] == [[".git", ".venv", "Makefile", "src"]] * 2
    assert (here / "repro/.venv").is_symlink()
    assert [path.name for path in here.iterdir()] == ["repro"]


def test_what_git_ignores_stays_out_of_the_container():
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line.removeprefix("**/") for line in lines if not line.startswith("#")] == ignored


def test_the_devcontainer_builds_the_containerfile():
    build = devcontainer()["build"]
    folder = ROOT / ".devcontainer"
    assert (folder / build["dockerfile"]).resolve() == ROOT / "Containerfile"
    assert (folder / build["context"]).resolve() == ROOT
    assert devcontainer()["remoteUser"] == dict(instructions())["USER"]
    assert re.search(r"ln -sfn (\S+)/\.venv", devcontainer()["postCreateCommand"])[1] == dict(instructions())["WORKDIR"]


def test_links_that_apptainer_copies_as_folders_are_links_again():
    """Else the checkout in the image differs from its commit."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-s"], capture_output=True, text=True)
    links = [line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")]
    if not links:
        pytest.skip("no checkout")
    for link in links:
        target = os.readlink(ROOT / link)
        assert f"rm -rf {link} && ln -s {target} {link}" in sections()["post"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_containerfile_builds_where_that_is_possible():
    program = next(filter(shutil.which, ("podman", "docker", "buildah")), None)
    if program is None:
        pytest.skip("no podman, docker or buildah here: the recipe was only parsed")
    base = dict(instructions())["FROM"]
    pulled = subprocess.run([program, "pull", base], capture_output=True, text=True)
    if pulled.returncode:
        pytest.skip(f"{program} cannot fetch {base}: the recipe was only parsed")
    build = "bud" if program == "buildah" else "build"
    subprocess.run(
        [program, build, "--tag", "repro-built-by-a-test", "--file", "Containerfile", "."], cwd=ROOT, check=True
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_apptainer_definition_builds_where_that_is_possible(tmp_path):
    if shutil.which("apptainer") is None:
        pytest.skip("no apptainer here: the definition was only parsed")
    base = dict(instructions())["FROM"]
    pulled = subprocess.run(["apptainer", "pull", tmp_path / "base.sif", f"docker://{base}"], capture_output=True)
    if pulled.returncode:
        pytest.skip(f"apptainer cannot fetch {base}: the definition was only parsed")
    subprocess.run(["apptainer", "build", tmp_path / "repro.sif", "apptainer.def"], cwd=ROOT, check=True)
