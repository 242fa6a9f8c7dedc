"""What a bundle holds, that the same commit and run give the same bytes, and that it works elsewhere."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from report.addresses import Addresses, unresolved
from small_checkout import EXPERIMENT, git, show
from typer.testing import CliRunner

from repro import __version__, cli, paths
from repro.bundle import contents, unpack
from repro.plan import config

DESCRIBED = {"SHA256SUMS", "ro-crate-metadata.json"}
REPLOT = Path("results/replot")


def test_it_holds_the_commit_and_what_the_run_shows(checkout, elsewhere):
    listed = subprocess.run(["git", "-C", checkout, "ls-files"], capture_output=True, text=True, check=True)
    shown = {f"results/rendered/{path}" for path in ("report.html", "claims.json", "figures/zero_bytes.png")}
    found = {path.relative_to(elsewhere).as_posix() for path in elsewhere.rglob("*") if not path.is_dir() or path.is_symlink()}  # fmt: skip
    assert found == {*listed.stdout.splitlines(), *shown, *DESCRIBED}
    for path in listed.stdout.splitlines():
        if not (checkout / path).is_symlink():
            assert (elsewhere / path).read_bytes() == (checkout / path).read_bytes(), path
    assert (elsewhere / "workflow").readlink() == Path("workflows")


def test_links_of_its_report_lead_to_what_it_holds(elsewhere):
    """Executed notebooks stay out: in their place stands the source."""
    page = elsewhere / "results/rendered/report.html"
    assert unresolved(page) == []
    addresses = Addresses(page.read_text()).links
    assert addresses[0] == "../../notebooks/zero.ipynb" and addresses[1].startswith("../reference/")


def test_usual_tools_check_and_unpack_it(bundle, tmp_path):
    subprocess.run(["tar", "xf", bundle], cwd=tmp_path, check=True)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"repro-papers-{__version__}-")
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)


def test_every_member_is_of_one_time_and_owner(bundle):
    with tarfile.open(bundle) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(1_700_000_000, 0, 0, "", "")}
    assert [m.name for m in members[1:]] == sorted(m.name for m in members[1:])


def test_another_clone_gives_the_same_bytes(checkout, bundle, tmp_path, monkeypatch):
    """In another folder, time zone and umask, with other times of files."""
    clone = tmp_path / "elsewhere" / "a clone"
    before = os.umask(0o077)
    try:
        subprocess.run(["git", "clone", "--quiet", checkout, clone], check=True)
        shutil.copytree(checkout / REPLOT, clone / REPLOT, copy_function=shutil.copyfile)
        for path in clone.rglob("*"):
            os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)
        environment = os.environ | {"REPRO_ROOT": str(clone), "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "7", "LC_ALL": "C.UTF-8"}  # fmt: skip
        command = [sys.executable, "-m", "repro", "bundle", "--out", str(tmp_path / "second.tar")]
        said = subprocess.run(command, cwd=clone, env=environment, check=True, capture_output=True, text=True).stdout
    finally:
        os.umask(before)
    digest = hashlib.sha256((tmp_path / "second.tar").read_bytes()).hexdigest()
    assert digest in said
    assert digest == hashlib.sha256(bundle.read_bytes()).hexdigest()


def test_other_records_give_another_manifest(here, bundle, tmp_path, monkeypatch):
    """A run of this machine goes in with its records, also those in deeper folders, where its report finds them."""
    run = tmp_path / "laptop"
    shutil.copytree(next(here.glob("results/reference/*/records")), run / "records")
    shown = sorted((run / "records" / EXPERIMENT).glob("*.json"))
    shown[0].unlink()
    (run / "records/more" / EXPERIMENT).mkdir(parents=True)
    for path in (shown[1], shown[1].with_suffix(".parquet")):
        path.rename(run / "records/more" / EXPERIMENT / path.name)
    show(run, run / "records")
    made = contents.make(run, tmp_path / "run.tar")
    folder = unpack(made.path, tmp_path / "into").folder
    assert below(folder / "results/rendered/records") == below(run / "records")
    assert unresolved(folder / "results/rendered/report.html") == []
    assert (folder / "SHA256SUMS").read_bytes() not in bundle.read_bytes()


def below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*")}


def test_a_bundle_that_fails_its_own_check_leaves_the_one_before(here, tmp_path, monkeypatch):
    (tmp_path / "b.tar").write_text("before")
    monkeypatch.setattr(contents, "unpack", lambda *_: pytest.fail("a member that none may have"))
    with pytest.raises(pytest.fail.Exception):
        contents.make(here / REPLOT, tmp_path / "b.tar")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("b.tar", "before")]


def refused(run: Path, said: str) -> None:
    with pytest.raises(ValueError) as error:
        contents.make(run, run.parent / "never.tar")
    assert said in str(error.value)
    assert not (run.parent / "never.tar").exists()


def test_a_changed_checkout_is_refused(here, tmp_path):
    (here / "new.txt").touch()
    try:
        refused(here / REPLOT, "found 1 files that differ from the commit (new.txt); allowed: none")
    finally:
        (here / "new.txt").unlink()


def test_no_checkout_is_refused(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_ROOT", str(elsewhere))
    run = elsewhere / "results/rendered"
    refused(run, "a bundle is made from a git commit; git rev-parse says: fatal: not a git repo")
    git(elsewhere.parent, "init", "--quiet")
    try:
        refused(run, f"found no git checkout here but in {elsewhere.parent.resolve()}")
    finally:
        shutil.rmtree(elsewhere.parent / ".git")


def test_an_unfinished_run_is_refused(here, tmp_path):
    refused(tmp_path / "nothing", "found no report.html; allowed: a finished run, or results/replot (`make replot`)")


@pytest.mark.parametrize("part", ["report.html", "claims.json", "figures"])
def test_a_run_that_lacks_a_part_is_refused(here, tmp_path, part):
    run = tmp_path / "run"
    shutil.copytree(here / REPLOT, run, ignore=shutil.ignore_patterns(part))
    refused(run, f"found no {part}")


def pictures(page):
    return re.findall(r'src="(data:image/[^"]+)"', page.read_text())


def test_verdicts_on_other_records_are_refused(here, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(here / REPLOT, run)
    rows = json.loads((run / "claims.json").read_text())
    rows[0]["agreement"] = "reproduced" if rows[0]["agreement"] != "reproduced" else "deviates"
    (run / "claims.json").write_text(json.dumps(rows))
    refused(run, "claims.json: found verdicts on other records or by other claims")
    (run / "claims.json").write_text("[" * 100_000)
    refused(run, "claims.json: found no JSON")


def test_a_file_that_is_no_record_is_refused(here, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(here / REPLOT, run)
    (run / "records" / EXPERIMENT).mkdir(parents=True)
    (run / "records" / EXPERIMENT / "half.json").write_text("{")
    refused(run, "half.json: not a run record")


def without_network(command, bundle):
    """In an unpacked bundle, with its code, and without the git repository that may be around it. The loopback, by which
    notebooks talk to their kernels, stays."""
    unshare = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("the network cannot be cut here: that needs root on Linux, and unshare")
    left_out = {"REPRO_ROOT", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(bundle / "src"), "GIT_CEILING_DIRECTORIES": str(bundle.parent)}
    subprocess.run([*unshare, *command], cwd=bundle, env=environment, check=True, capture_output=True)


def test_unpacked_elsewhere_it_draws_without_network_and_git(elsewhere, tmp_path):
    without_network([sys.executable, "-m", "repro", "figure", "zero_bytes", "--out", str(tmp_path)], elsewhere)
    assert (tmp_path / "zero_bytes.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "zero_bytes.png").stat().st_size > 10_000


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_all_of_it_is_drawn_again_elsewhere_byte_for_byte(tmp_path, monkeypatch):
    """The shipped records: the second line of docs/bundle.md, with the environment of this test."""
    clone, environment = tmp_path / "clone", Path(sys.prefix)
    if not (environment / ".ready").exists():
        pytest.skip("not in an environment that `make` made")
    subprocess.run(["git", "clone", "--quiet", paths.root(), clone], check=True)
    replot = ["make", "replot", f"VENV={environment}", f"--old-file={environment}/.ready"]
    without_network(replot, clone)
    monkeypatch.setenv("REPRO_ROOT", str(clone))
    made = contents.make(clone / REPLOT, tmp_path / "bundle.tar").path
    bundle = unpack(made, tmp_path / "unpacked").folder
    without_network(replot, bundle)
    rendered = bundle / "results/rendered"
    shown = [*sorted(rendered.glob("figures/*.png")), rendered / "claims.json"]
    assert len(shown) > 40
    again = [bundle / REPLOT / path.relative_to(rendered) for path in shown]
    assert [one.name for one, two in zip(shown, again, strict=True) if one.read_bytes() != two.read_bytes()] == []
    report = bundle / config.load()[0].shipped / "report.html"
    assert pictures(report) == pictures(bundle / REPLOT / "report.html"), "the shipped report is not of these records"


def test_the_commands_say_what_they_did(here, tmp_path):
    runner, archive = CliRunner(), str(tmp_path / "b.tar")
    made = runner.invoke(cli.app, ["bundle", "--out", archive])
    assert made.exit_code == 0, made.output
    assert hashlib.sha256(Path(archive).read_bytes()).hexdigest() in made.output
    checked = runner.invoke(cli.app, ["unbundle", "--check", archive])
    assert checked.exit_code == 0 and "all as the manifest says" in checked.output
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]
