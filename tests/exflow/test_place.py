"""`repro place`, the files it writes, and the experiments on routing traces."""

import contextlib
import importlib
import json
from typing import get_args, get_type_hints

import numpy as np
import pytest
from typer.testing import CliRunner

from repro import cli, exflow, experiments
from repro.exflow.serving import export, fanout, slots

KEYS = {
    "hops_per_token",
    "crossing_fraction",
    "intra_hops",
    "inter_hops",
    "bound",
    "gap",
    "bound_share",
    "seconds",
    "max_load",
}


@pytest.fixture
def trace_file(tmp_path, make_trace):
    path = tmp_path / "trace.npy"
    np.save(path, make_trace(4, 8, 2000).astype(np.uint8))
    return path


def place(path, options, **files):
    """What `repro place PATH OPTIONS --json` prints; a file given as NAME=PATH stands for {NAME} in the options."""
    found = CliRunner().invoke(cli.app, ["place", str(path), *options.format(**files).split(), "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def read_csv(path, num_experts):
    """GPU of every expert, int [layers, E], from a written CSV."""
    return np.loadtxt(path, int, delimiter=",", skiprows=1)[:, 1].reshape(-1, num_experts)


def refused(path, options):
    """What it says of options that are refused."""
    found = CliRunner().invoke(cli.app, ["place", str(path), *options.split()])
    assert found.exit_code == 2
    return " ".join(found.output.replace("│", " ").split())


def test_keys_numbers_and_csv(tmp_path, trace_file, monkeypatch):
    out, seen = tmp_path / "new" / "placement.csv", []
    command = importlib.import_module("repro.cli.place")
    bar = contextlib.nullcontext(lambda fraction, text: seen.append((fraction, text)))
    monkeypatch.setattr(command, "progress", lambda text: bar)
    result = place(trace_file, "--gpus 4 --gpus-per-node 2 --out {out}", out=out)
    assert set(result) == KEYS and all(isinstance(value, float) for value in result.values())
    gpu = read_csv(out, 8)
    counts = exflow.transitions(exflow.load_trace(trace_file))
    cost = exflow.evaluate(exflow.Placement(gpu, 4, 2, "affinity"), counts)
    assert result["hops_per_token"] == pytest.approx(cost.hops_per_token) == result["intra_hops"] + result["inter_hops"]
    assert result["bound"] <= result["crossing_fraction"] and result["max_load"] == cost.max_load
    assert seen[-1][0] == 1.0 and all(text for _, text in seen)
    assert [path.name for path in out.parent.iterdir()] == ["placement.csv"]  # no temporary file left


def test_csv_is_the_published_format(tmp_path):
    """Header and numbering of the placements in the authors' repository: expert e of layer l is l * E + e."""
    export.write_csv(exflow.Placement(np.array([[0, 1], [1, 0]]), 2, 2, "affinity"), tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == "Expert,Node\n0,0\n1,1\n2,1\n3,0\n"


GPU = np.array([[0, 1, 1, 0], [1, 0, 1, 0]])  # places of layer 0: experts 0 3 | 1 2, of layer 1: 1 3 | 0 2


def test_servers_read_which_expert_lies_in_each_place(tmp_path):
    assert slots.physical_to_logical(GPU).tolist() == [[0, 3, 1, 2], [1, 3, 0, 2]]
    exflow.FORMATS["vllm"](exflow.Placement(GPU, 2, 2, "affinity"), tmp_path / "vllm.json")
    assert json.loads((tmp_path / "vllm.json").read_text()) == [[0, 3, 1, 2], [1, 3, 0, 2]]
    exflow.FORMATS["sglang"](GPU, tmp_path / "sglang.json", dense_layers=1)
    found = json.loads((tmp_path / "sglang.json").read_text())
    assert found == {"physical_to_logical_map": [[0, 1, 2, 3], [0, 3, 1, 2], [1, 3, 0, 2]]}
    exflow.FORMATS["vllm-ascend"](GPU, tmp_path / "ascend.json")
    found = json.loads((tmp_path / "ascend.json").read_text())
    assert found["moe_layer_count"] == 2
    assert found["layer_list"][1] == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [{"device_id": 0, "device_expert": [1, 3]}, {"device_id": 1, "device_expert": [0, 2]}],
    }
    with pytest.raises(ValueError, match=r"map\.txt: SGLang reads a file as JSON when its name ends in \.json"):
        exflow.FORMATS["sglang"](GPU, tmp_path / "map.txt")
    for name in exflow.FORMATS:
        with pytest.raises(ValueError, match="layer 0 has 3 experts on GPU 0, allowed: 2 on each"):
            exflow.FORMATS[name](np.array([[0, 0, 0, 1], [0, 0, 1, 1]]), tmp_path / "uneven.json")
        with pytest.raises(ValueError, match=r"gpu is float64 \(2, 4\), must be integers"):
            exflow.FORMATS[name](GPU.astype(float), tmp_path / "uneven.json")
        with pytest.raises(ValueError, match="gpu is -1 to 0, allowed: 0 to 0"):
            exflow.FORMATS[name](GPU - 1, tmp_path / "uneven.json")
    assert not (tmp_path / "uneven.json").exists()


def test_a_placement_of_a_file_has_the_numbers_that_it_was_written_with(tmp_path, trace_file):
    """Also as the authors' files are: line ends of another system, experts in any order."""
    first = place(trace_file, "--gpus 4 --gpus-per-node 2 --rounds 2 --out {out}", out=tmp_path / "p.csv")
    header, *rows = (tmp_path / "p.csv").read_text().splitlines()
    (tmp_path / "theirs.csv").write_text("\r\n".join([header, *rows[::-1], ""]), newline="")
    for name in ("p.csv", "theirs.csv"):
        again = place(trace_file, "--gpus 4 --gpus-per-node 2 --evaluate {file}", file=tmp_path / name)
        assert again | {"seconds": 0} == first | {"seconds": 0} and again["seconds"] == 0
    moved = place(trace_file, "--gpus 4 --evaluate {file} --out {out}", file=tmp_path / "p.csv", out=tmp_path / "q.csv")
    assert moved["inter_hops"] == 0 and (tmp_path / "q.csv").read_text() == (tmp_path / "p.csv").read_text()


GIVEN = [f"{expert},{expert % 4}" for expert in range(32)]  # 4 layers of 8 experts on 4 GPUs


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "row 1 is 'missing', allowed: 'Expert,Node'"),
        (["Expert,GPU", *GIVEN], "row 1 is 'Expert,GPU', allowed: 'Expert,Node'"),
        (["Expert,Node", *GIVEN[:5]], "27 of 32 experts have no row, expert 5 the first"),
        (["Expert,Node", "0,x", *GIVEN[1:]], "row 2 is '0,x', allowed: two whole numbers"),
        (["Expert,Node", "0,-1", *GIVEN[1:]], "row 2 is '0,-1', allowed: two whole numbers"),
        (["Expert,Node", *GIVEN, ""], "row 34 is '', allowed: two whole numbers"),
        (["Expert,Node", *GIVEN, "32,0"], "row 34 has expert 32 on GPU 0, allowed: experts 0 to 31, GPUs 0 to 3"),
        (["Expert,Node", "0,4", *GIVEN[1:]], "row 2 has expert 0 on GPU 4"),
        (["Expert,Node", *GIVEN, "3,3"], "row 34 has expert 3 again, allowed: once"),
        (["Expert,Node", *GIVEN[:8], "8,1", *GIVEN[9:]], "layer 1 has 1 experts on GPU 0, allowed: 2 on each"),
        (["Expert,Node", *GIVEN, *GIVEN * 90], "bytes, too long for 4 layers of 8 experts"),
        (["Expert,Node", "\u0660,0", *GIVEN[1:]], "allowed: two whole numbers"),
    ],
)
def test_a_placement_of_a_file_is_refused_by_row(tmp_path, lines, message):
    path = tmp_path / "p.csv"
    path.write_text("\n".join(lines) + "\n" * bool(lines), "utf-8")
    with pytest.raises(ValueError, match=r"p\.csv: ") as error:
        exflow.read_csv(path, 4, 8, 4)
    assert message in str(error.value)


def test_no_placement_to_evaluate(tmp_path, trace_file):
    (tmp_path / "p.csv").write_bytes(b"Expert,Node\n\xff,0\n")
    assert "no such placement" in refused(trace_file, f"--gpus 4 --evaluate {tmp_path / 'none.csv'}")
    assert "not a CSV file" in refused(trace_file, f"--gpus 4 --evaluate {tmp_path / 'p.csv'}")
    assert "an ordinary file" in refused(trace_file, f"--gpus 4 --evaluate {tmp_path}")
    for option in ("--max-load 2", "--objective gpus"):
        assert "nothing is searched" in refused(trace_file, f"--gpus 4 {option} --evaluate {tmp_path / 'p.csv'}")


def test_choices_are_those_of_the_library():
    hints = get_type_hints(importlib.import_module("repro.cli.place").place)
    assert get_args(hints["method"]) == tuple(exflow.METHODS) and get_args(hints["format_"]) == tuple(exflow.FORMATS)
    assert get_args(hints["objective"]) == ("hops", *fanout.OBJECTIVES)
    assert set(get_args(hints["dispatch"])) == set(slots.DISPATCHES)


def test_the_format_that_is_asked_for_is_written(tmp_path, trace_file):
    place(trace_file, "--gpus 4 --out {out} --format sglang --dense-layers 2", out=tmp_path / "map.json")
    places = np.array(json.loads((tmp_path / "map.json").read_text())["physical_to_logical_map"])
    assert places.shape == (2 + 4, 8) and (np.sort(places) == np.arange(8)).all()


def test_top_k_and_errors(tmp_path):
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8), (300, 3, 1)), axis=2)[:, :, :2]
    np.savez(tmp_path / "t.npz", experts=experts)
    one, two = (place(tmp_path / "t.npz", f"--gpus 4 --top-k {k}") for k in (1, 2))
    assert one["hops_per_token"] != two["hops_per_token"]
    assert "top-3 asked of a top-2 trace" in refused(tmp_path / "t.npz", "--gpus 4 --top-k 3")
    message = "--extra-slots is 1: copies are for top-1 routing, found top-2; use --top-k 1"
    assert message in refused(tmp_path / "t.npz", "--gpus 4 --extra-slots 1")
    assert set(two) - set(one) == {"gpus", "nodes", "new_gpus", "new_nodes"} and 1 < two["gpus"] <= 2
    assert "8 experts per layer cannot be shared evenly by 3 GPUs" in refused(tmp_path / "t.npz", "--gpus 3")


def run(name, **point):
    experiment = experiments.get(name)
    return experiment.run(experiment.parameters(**point))


def test_affinity_experiment():
    found = run("exflow_affinity", tokens=3000)
    value = found.metrics.model_dump(exclude_none=True)
    assert found.evidence == "measured" and found.conditions["tokens_used"] == "3000"
    assert value["mutual_information"] > 4 * value["mutual_information_shuffled"] > 0
    assert 0 < value["normalized_mutual_information_shuffled"] < value["normalized_mutual_information"] < 1
    pairs, routing = (found.series[found.series.kind == kind] for kind in ("pair", "routing"))
    assert len(pairs) == 23 and pairs.bits.mean() == pytest.approx(value["mutual_information"])
    rows = routing.groupby("from_expert").probability.sum()
    assert len(rows) == 32 and set(np.round(rows, 9)) <= {0.0, 1.0}


def test_placement_experiment_counts_held_out_sequences():
    """Rank order on the shipped trace, against a count over the tokens that were not placed by."""
    found = run("exflow_placement", method="contiguous", gpus=4, seed=1)
    from repro import paths

    trace = exflow.load_trace(paths.data("gptoss20b_routing.npz"), top_k=1)
    tokens = trace.split(0.7, 1)[1].experts // 8
    assert found.metrics.crossing_fraction == pytest.approx((tokens[:, 1:] != tokens[:, :-1]).mean())
    assert found.metrics.hops_per_token == pytest.approx((tokens[:, 1:] != tokens[:, :-1]).sum(1).mean())
    assert found.metrics.bound <= found.metrics.train_crossing_fraction
    assert found.conditions["routing"] == "gpt-oss-20b top-1, all domains, held out"


def test_placement_experiment_on_few_tokens_and_nodes():
    found = run("exflow_placement", method="affinity", gpus=16, gpus_per_node=4, train_tokens=500)
    value = found.metrics.model_dump(exclude_none=True)
    assert found.conditions["tokens_used"] == "500"
    assert value["train_crossing_fraction"] < value["crossing_fraction"] < 0.9  # optimism on the tokens placed by
    assert value["node_crossing_fraction"] < 0.6 and value["inter_hops"] + value["intra_hops"] == pytest.approx(
        value["hops_per_token"]
    )
    assert found.metrics.mip_gap is None


def test_serving_experiment_counts_copies_and_whole_tokens_on_held_out_sequences():
    """Without copies its hops are those of the placement experiment; with as many slots as experts hardly any are left.

    An expert that no training token visits gets no copy.
    """
    fields = {"method": "contiguous", "gpus": 2, "gpus_per_node": 2}
    plain, full = (run("exflow_serving", **fields, extra_slots=more) for more in (0, 16))
    hops = run("exflow_placement", method="contiguous", gpus=2).metrics.hops_per_token
    assert plain.metrics.hops_per_token == pytest.approx(hops) and full.metrics.hops_per_token < 0.01
    several = run("exflow_serving", method="contiguous", top_k=4, gpus=2, gpus_per_node=1).metrics
    from repro import paths

    gpus = exflow.load_trace(paths.data("gptoss20b_routing.npz")).split(0.7, 0)[1].experts // 16
    assert several.gpus_visited == pytest.approx((1 + (gpus.min(2) != gpus.max(2))).mean())
    for wrong, says in (
        ({"top_k": 5}, "top_k is 5"),
        ({"top_k": 4, "extra_slots": 1}, "copies are for top_k 1"),
        ({"extra_slots": 29}, "extra_slots is 29, allowed"),
        ({"gpus_per_node": 3}, "gpus is "),
    ):
        with pytest.raises(ValueError, match=says):
            run("exflow_serving", **wrong)


def test_a_topology_within_a_load_limit(trace_file):
    result = place(trace_file, "--levels node=2,rack=2 --costs 1,7 --max-load 1.3 --rounds 2")
    assert set(result) == KEYS | {"weighted_hops", "node_hops", "rack_hops", "max_load_worst_layer"}
    assert result["node_hops"] == pytest.approx(result["intra_hops"])
    assert result["weighted_hops"] == pytest.approx(result["node_hops"] + 7 * result["rack_hops"])
    assert result["max_load_worst_layer"] <= 1.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--gpus and --levels: give one of them"),
        ("--gpus 4 --levels node=4", "--gpus and --levels: give one of them"),
        ("--levels node=4,8", "--levels node=4,8: '8' is not NAME=SIZE"),
        ("--levels node=0", "--levels node=0: level 'node': size is 0"),
        ("--levels node=2,node=2", "--levels node=2,node=2: levels need distinct names"),
        ("--levels node=4 --gpus-per-node 2", "--gpus-per-node is 2: a topology already has its levels"),
        ("--gpus 4 --costs 1,x", "--costs 1,x: could not convert string to float"),
        ("--gpus 4 --costs 1,2", "--costs are (1.0, 2.0), must be one per level, innermost first: node"),
        (
            "--gpus 4 --format tsv",
            "'tsv' is not one of 'csv', 'sglang', 'vllm', 'vllm-ascend'",
        ),
        ("--gpus 4 --dense-layers 3", "--dense-layers is 3: only SGLang's format counts them, found format 'csv'"),
        ("--gpus 4 --method best", "'best' is not one of 'contiguous'"),
        ("--gpus 4 --max-load 0.5", "--max-load is 0.5, must be at least 1"),
        ("--gpus 4 --max-load 1.2 --method random", "--max-load is 1.2: only method affinity"),
        ("--gpus 4 --max-load 1.0001", "--max-load is 1.0001: no placement"),
        (
            "--gpus 4 --objective pairs",
            "'pairs' is not one of 'hops', 'new_gpus', 'gpus'",
        ),
        ("--gpus 4 --objective gpus --max-load 2", "--max-load is 2.0: kept with objective hops only, found gpus"),
        ("--gpus 4 --pareto --update x.csv", "--pareto and --update: give one of them"),
        ("--gpus 4 --pareto --objective gpus", "--pareto and --objective gpus: give one of them"),
        ("--gpus 4 --moves 2", "--moves is 2: counts from an old placement, give --update"),
        ("--gpus 4 --update none.json", "none.json: no such placement"),
        ("--gpus 4 --pareto --out x.csv", "--out x.csv: --pareto writes no placement"),
        ("--gpus 4 --dispatch shares --out x.csv", "--dispatch is shares: no format of --out holds the shares"),
        ("--gpus 4 --tokens-needed", "no sequence boundaries"),
        ("--gpus 4 --format sglang --out x.csv", "--out x.csv: SGLang reads a file as JSON"),
        ("--gpus 4 --extra-slots 7", "--extra-slots is 7, allowed: 0 to 6"),
        ("--gpus 4 --extra-slots 1 --dispatch x", "'x' is not one of 'nearest', 'round_robin', 'shares'"),
        ("--gpus 4 --extra-slots 1 --out x.csv", "--format is csv: it has no copies of experts, allowed: sglang, vllm"),
    ],
)
def test_wrong_options_are_named(trace_file, options, message):
    assert message in refused(trace_file, options)


def test_copies_come_into_the_file_and_save_what_they_are_for(tmp_path, trace_file):
    def placed(name, limit):
        options = f"--gpus 4 --gpus-per-node 2 --extra-slots 1 {limit} --rounds 1 --format vllm --dispatch round_robin"
        return place(trace_file, options + " --out {out}", out=tmp_path / f"{name}.json")

    hops, load = placed("hops", ""), placed("load", "--max-load 1")
    assert hops["copies_hops_per_token"] < load["copies_hops_per_token"]
    assert load["copies_max_load_worst_layer"] < hops["copies_max_load_worst_layer"]
    places = np.array(json.loads((tmp_path / "hops.json").read_text()))
    found = exflow.evaluate_replicas(exflow.Replicas(places, 4, 2), exflow.load_trace(trace_file), "round_robin")
    assert places.shape == (4, 4 * 3) and found.hops_per_token == hops["copies_hops_per_token"]


def test_an_update_moves_few_experts_of_any_file(tmp_path, trace_file):
    place(trace_file, "--gpus 4 --method contiguous --out {out}", out=tmp_path / "old.csv")
    options = "--gpus 4 --rounds 1 --format sglang --out {out} --update "
    first = place(trace_file, f"{options}{tmp_path / 'old.csv'} --moves 6", out=tmp_path / "new.json")
    assert 0 < first["moved"] <= 6 and first["copies_hops_per_token"] < first["old_hops_per_token"]
    again = place(trace_file, f"{options}{tmp_path / 'new.json'} --moves 0", out=tmp_path / "same.json")
    assert again["moved"] == 0 and again["old_hops_per_token"] == first["copies_hops_per_token"]
    place(trace_file, f"--gpus 4 --out {{out}} --moves 0 --update {tmp_path / 'new.json'}", out=tmp_path / "same.csv")
    kept = place(trace_file, f"--gpus 4 --evaluate {tmp_path / 'same.csv'}")
    assert kept["hops_per_token"] == pytest.approx(first["copies_hops_per_token"])
    for wrong in ("null", "3", '{"0": [1]}'):
        (tmp_path / "wrong.json").write_text(f'{{"physical_to_logical_map": {wrong}}}')
        assert "no map of experts by slot" in refused(trace_file, f"--gpus 4 --update {tmp_path / 'wrong.json'}")
    assert "no map of experts by slot for 3 GPUs" in refused(trace_file, f"--gpus 3 --update {tmp_path / 'new.json'}")


def test_an_update_of_copies_into_a_format_without_them_is_refused_before_the_search(tmp_path, trace_file):
    place(trace_file, "--gpus 4 --extra-slots 1 --top-k 1 --format vllm --out {out}", out=tmp_path / "old.json")
    said = refused(trace_file, f"--gpus 4 --top-k 1 --update {tmp_path / 'old.json'} --out {tmp_path / 'new.csv'}")
    assert "format is csv: it has no copies of experts, allowed: sglang, vllm" in said


def test_an_update_of_a_map_with_dense_layers_leaves_these_out(tmp_path, trace_file):
    options = "--gpus 4 --rounds 1 --format sglang --dense-layers 2 --out {out}"
    first = place(trace_file, options, out=tmp_path / "old.json")
    again = place(trace_file, f"{options} --moves 0 --update {tmp_path / 'old.json'}", out=tmp_path / "new.json")
    assert again["moved"] == 0 and again["copies_hops_per_token"] == pytest.approx(first["hops_per_token"])
    assert (tmp_path / "new.json").read_text() == (tmp_path / "old.json").read_text()
    assert "6 layers of 8 experts, the trace has 4" in refused(trace_file, f"--gpus 4 --update {tmp_path / 'old.json'}")


def test_a_front_and_how_many_tokens(tmp_path, trace_file):
    rows = place(trace_file, "--gpus 4 --pareto --extra-slots 1 --rounds 1")
    loads, hops = ([row[name] for row in rows] for name in ("max_load", "hops_per_token"))
    assert len(rows) > 1 and loads == sorted(loads) and hops == sorted(hops, reverse=True)
    np.savez(tmp_path / "t.npz", experts=np.load(trace_file), seq_len=np.full(10, len(np.load(trace_file)) // 10))
    found = place(tmp_path / "t.npz", "--gpus 4 --tokens-needed --rounds 1")
    assert found["recorded"] == len(np.load(trace_file)) and found["hops_at_best"] > 0 and found["loss"] >= 0


@pytest.mark.parametrize("objective", ["new_gpus", "gpus"])
def test_placing_for_whole_tokens_lowers_what_it_is_for(tmp_path, objective):
    """Top-2 of 16 experts that come in fixed quadruples: pairs and tokens want different placements."""
    rng = np.random.default_rng(0)
    groups = rng.permuted(np.tile(np.arange(16), (4, 1)), axis=1).reshape(4, 4, 4)  # layer, group, its experts
    group = rng.integers(4, size=500)
    experts = np.stack([rng.permuted(each[group], axis=1)[:, :2] for each in groups], axis=1)
    np.savez(tmp_path / "t.npz", experts=experts)
    options = "--gpus 4 --method contiguous --time-limit 2 --num-experts 16"
    before = place(tmp_path / "t.npz", options)
    after = place(tmp_path / "t.npz", f"{options} --objective {objective}")
    assert after[objective] < 0.7 * before[objective] and after["gpus"] >= 1


def test_place_from_the_command_line_on_three_levels(trace_file, tmp_path):
    levels = "--levels node=2,rack=2,cluster=2 --costs 1,2,5 --rounds 1"
    assert place(trace_file, levels + " --out {out}", out=tmp_path / "p.csv")["cluster_hops"] > 0
    assert (np.sort(read_csv(tmp_path / "p.csv", 8)) == np.arange(8)).all()
