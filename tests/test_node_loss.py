"""A node that goes away takes its actors along: they are replaced where there is room, else what is
missing is said. A real cluster of two nodes, of which one is killed; no engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from clusters import Command, LocalCluster

LIMIT_S = 300

SCRIPT = """
import json, sys, time
import ray
from rock_opd.actors.fleet import Fleet, Limits
from rock_opd.actors.placement import Placement
from rock_opd.actors.processes import this_process
from rock_opd.actors.waiting import gather
from rock_opd.recipe_file import build_recipe
from rock_opd.errors import PlacementError

class Teacher:
    def __init__(self, gpus):
        pass
    def identify(self, role, index):
        return this_process(role, index)
    def start(self):
        pass
    def score(self, number, seconds):
        time.sleep(seconds)
        return number * number

ray.init(logging_level="ERROR", log_to_driver=False)
base = {"run": {"dir": ".", "device": "cpu", "start_timeout_s": 200}, "data": {"prompts": "p"},
        "student": {"model": "s"}, "teacher": {"model": "t", "num_replicas": 2}}
placement = Placement(build_recipe(base, sys.argv[1:]), "cpu", ("teacher",))
fleet = Fleet(
    "teacher", Teacher, placement.slots("teacher"), lambda h: h.start.remote(),
    Limits(start_s=200, phase_s=200, stall_s=60, max_replacements=3),
    joined=lambda process: None, replaced=lambda r: print("REPLACED", r.cause, flush=True),
    wait_for_room=lambda what, ready: placement.wait_for(what, ready, print),
)
gather("teacher", "start", fleet.spawn()[1], 200)
print("READY", json.dumps({i: p.node_id for i, p in fleet.processes.items()}), flush=True)
calls = {i: lambda h, i=i: h.score.remote(i + 3, 20 if not fleet.fresh else 0) for i in (0, 1)}
try:
    answers = fleet.each("score", calls)
except PlacementError as error:
    print("MISSING", error, flush=True)
else:
    stand = {i: p.node_id for i, p in fleet.processes.items()}
    print("ANSWERS", json.dumps([answers, stand]), flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    made = LocalCluster("--num-cpus=2", '--resources={"first": 4}')
    try:
        yield made
    finally:
        made.stop()


def lose_the_second_node(cluster: LocalCluster, folder: Path, *overrides: str) -> str:
    """Starts two teachers, kills the second node with all on it; what was said."""
    cluster.join("--num-cpus=2", '--resources={"second": 4}')
    args = [sys.executable, "-c", SCRIPT, *overrides]
    with Command(args, env=cluster.env, cwd=folder) as run:
        run.wait_for("READY", LIMIT_S)
        cluster.lose()
        run.finish(LIMIT_S)
        return run.text


def said(text: str, word: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(word + " "))
    return line.removeprefix(word + " ")


def test_actors_of_a_lost_node_are_replaced_on_another(cluster, tmp_path):
    text = lose_the_second_node(
        cluster, tmp_path, "placement.strategy=spread", "placement.teacher_cpus=1"
    )
    before = json.loads(said(text, "READY"))
    answers, after = json.loads(said(text, "ANSWERS"))
    assert answers == {"0": 9, "1": 16}
    assert len(set(before.values())) == 2 and len(set(after.values())) == 1
    assert "died in phase 'score': " in said(text, "REPLACED")


def test_where_there_is_no_room_for_them_what_is_missing_is_said(cluster, tmp_path):
    text = lose_the_second_node(cluster, tmp_path, "placement.teacher_on=second")
    assert "the cluster is too small" in said(text, "MISSING")
    assert "second" in said(text, "MISSING")
    assert "ANSWERS" not in text
