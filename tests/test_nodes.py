"""``rock-opd check --cluster``: what nodes must have in common, and two real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rock_opd.findings import CheckReport
from rock_opd.nodes import NodeFacts, check_nodes, local_paths, look, node_findings
from rock_opd.recipe_file import build_recipe

HERE = NodeFacts(
    name="head",
    folder_error=None,
    sees_marker=True,
    sizes={"/models/student": 100, "/data/p.jsonl": 7},
    versions={"python": "3.11.9", "torch": "2.13.0"},
)


def lines(*nodes: NodeFacts | str) -> list[str]:
    found = node_findings(HERE, {f"n{i}": node for i, node in enumerate(nodes)}, "/runs")
    return [str(finding) for finding in found]


def test_nodes_that_agree_are_one_line():
    (line,) = lines(HERE, HERE)
    assert line.startswith("ok    2 nodes: each writes to /runs, sees student, p.jsonl")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"folder_error": "Read-only file system"}, "cannot write to run.dir /runs (Read-only"),
        ({"sees_marker": False}, "its /runs is another folder than this process's"),
        ({"sizes": HERE.sizes | {"/data/p.jsonl": None}}, "does not see /data/p.jsonl"),
        ({"sizes": {}}, "does not see /models/student"),
        ({"sizes": HERE.sizes | {"/models/student": 99}}, "has 99 bytes, here it has 100"),
        (
            {"versions": {"python": "3.11.9", "torch": "2.12.0"}},
            "other library versions: torch 2.12.0 (here 2.13.0); install the same set",
        ),
        ({"versions": {"python": "3.11.9"}}, "torch missing (here 2.13.0)"),
    ],
)
def test_what_a_node_lacks_is_named_with_the_node_and_what_to_do(change, said):
    found = lines(HERE, replace(HERE, **change))
    assert found and all(line.startswith("FAIL  node n1: ") and ";" in line for line in found)
    assert said in found[0]


def test_a_node_that_does_not_answer_is_a_failure():
    assert lines("did not answer: no worker") == ["FAIL  node n0: did not answer: no worker"]


def test_what_is_written_to_see_whether_it_can_be_is_removed(tmp_path):
    facts = look(str(tmp_path / "runs"), "marker", (str(tmp_path), str(tmp_path / "nothing")))
    assert facts.folder_error is None and not facts.sees_marker
    assert list((tmp_path / "runs").iterdir()) == []
    assert facts.sizes == {str(tmp_path): 0, str(tmp_path / "nothing"): None}
    assert facts.versions["torch"]


def test_a_folder_that_cannot_be_made_is_told_by_its_reason(tmp_path):
    (tmp_path / "file").touch()
    assert look(str(tmp_path / "file" / "runs"), "m", ()).folder_error == "Not a directory"


def test_of_a_model_folder_only_what_a_model_is_made_of_counts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "README.md").write_text("said on one node only")
    assert look(str(tmp_path / "runs"), "m", (str(tmp_path),)).sizes == {str(tmp_path): 7}


# --- two real nodes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_every_node_is_asked(two_nodes, tiny_models: Path, tmp_path: Path):
    recipe = build_recipe(
        {
            "run": {"dir": str(tmp_path / "runs")},
            "data": {"prompts": str(tiny_models / "prompts.jsonl")},
            "student": {"model": str(tiny_models / "student")},
            "teacher": {"model": "hub/teacher"},
        },
        [],
    )
    assert local_paths(recipe) == (recipe.student.model, recipe.data.prompts)
    report = CheckReport()
    check_nodes(report, recipe)
    (line,) = report.lines
    assert line.startswith("ok    2 nodes: each writes to "), line
    assert list((tmp_path / "runs").iterdir()) == []

    (tmp_path / "file").touch()
    report = CheckReport()
    check_nodes(report, build_recipe({}, [f"run.dir={tmp_path}/file/x"], needed=()))
    assert report.failed and "cannot be written here (Not a directory)" in report.lines[0]
