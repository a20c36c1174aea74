"""Where actors go: on three nodes of a real Ray cluster, two of them with GPUs in name only; no
engines."""

from __future__ import annotations

import re
import threading
import time

import pytest

from rock_opd.errors import ConfigError, PlacementError
from rock_opd.recipe_file import build_recipe

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402  (needs ray)

from rock_opd.actors.placement import (  # noqa: E402
    Placement,
    coordinator_need,
    holders,
    lay_out,
    start_coordinator,
)
from rock_opd.actors.waiting import Stopped  # noqa: E402

ALL = ("student", "rollout", "teacher")
AT_ONCE_S = 15
"""Said without waiting: two questions to Ray, on a machine that may be busy."""


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(
        initialize_head=True,
        connect=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 10**8},
    )
    small = {"num_cpus": 2, "num_gpus": 3, "object_store_memory": 10**8}
    made.add_node(**small, resources={"gpu_small": 1})
    made.add_node(**small, labels={"pool": "big"})
    made.wait_for_nodes()
    yield {
        node["Resources"].get("gpu_small", 0) + 2 * ("pool" in node["Labels"]): node["NodeID"]
        for node in ray.nodes()
    }  # 0: the head, 1: gpu_small, 2: pool=big
    ray.shutdown()
    made.shutdown()


def recipe(*overrides: str):
    base = {
        "run": {"name": "mine", "start_timeout_s": 60},
        "data": {"prompts": "p.jsonl"},
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "placement": dict.fromkeys(("rollout_cpus", "teacher_cpus", "student_cpus"), 0),
    }
    return build_recipe(base, list(overrides))


def stand(placement: Placement, role: str) -> list[tuple[str, list[int]]]:
    """Node and GPUs of an actor started in each of a role's slots."""

    class Probe:
        def where(self):
            import ray

            context = ray.get_runtime_context()
            return context.get_node_id(), [int(i) for i in ray.get_gpu_ids()]

    actors = [ray.remote(Probe).options(**slot.options).remote() for slot in placement.slots(role)]
    found = ray.get([actor.where.remote() for actor in actors], timeout=120)
    for actor in actors:
        ray.kill(actor)
    return found


# --- the layout, without a cluster ----------------------------------------------------------------


def test_an_engine_over_several_gpus_is_one_bundle_and_so_on_one_node():
    layout = lay_out(recipe("teacher.tensor_parallel=4", "teacher.num_replicas=2"), "cuda", ALL)
    assert [dict(need.resources) for need in layout.bundles] == [
        {"GPU": 1},  # student
        {"GPU": 1},  # rollout
        {"GPU": 4},
        {"GPU": 4},
    ]
    assert [seat.bundle for seat in layout.seats["teacher"]] == [2, 3]
    assert not layout.shared


def test_roles_that_share_gpus_share_bundles_as_wide_as_the_widest():
    """Teacher of 4 GPUs, six rollout engines of 1: bundles of 4 and 2; the student has its own."""
    shared = recipe(
        "placement.colocate=teacher_rollout",
        "teacher.tensor_parallel=4",
        "rollout.num_workers=6",
        "placement.rollout_cpus=1",
        "placement.teacher_cpus=2",
    )
    layout = lay_out(shared, "cuda", ALL)
    assert [dict(need.resources) for need in layout.bundles] == [
        {"CPU": 6, "GPU": 4},
        {"CPU": 2, "GPU": 2},
        {"GPU": 1},
    ]
    assert [(s.bundle, list(s.gpus)) for s in layout.seats["rollout"]] == [
        *((0, [i]) for i in range(4)),
        (1, [0]),
        (1, [1]),
    ]
    assert [(s.bundle, list(s.gpus)) for s in layout.seats["teacher"]] == [(0, [0, 1, 2, 3])]
    assert layout.seats["student"][0].bundle == 2 and layout.shared == {"rollout", "teacher"}


def test_the_coordinator_reserves_cpus_memory_and_its_nodes():
    need = coordinator_need(
        recipe("placement.coordinator_memory_gb=8", "placement.coordinator_on=head")
    )
    assert dict(need.resources) == {"memory": 8 * 2**30, "head": 0.001}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.strategy=spred"], "did you mean 'spread'"),
        (["placement.rollout_on=GPU"], "must be a custom resource that marks nodes"),
        (["placement.teacher_on='a b'"], "must name a custom resource"),
        (
            ["placement.colocate=all", "placement.student_on=a"],
            "roles that share GPUs stand on the same nodes",
        ),
        (
            [
                "placement.colocate=teacher_rollout",
                "rollout.tensor_parallel=2",
                "teacher.tensor_parallel=3",
            ],
            "one must divide the other",
        ),
    ],
)
def test_placements_that_cannot_be_meant_are_refused_without_a_cluster(overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipe(*overrides)


# --- on the cluster -------------------------------------------------------------------------------


def test_a_cluster_too_small_is_said_at_once_with_a_table(cluster):
    started = time.monotonic()
    with pytest.raises(PlacementError) as error:
        Placement(recipe("placement.rollout_cpus=1", "rollout.num_workers=7"), "cpu", ALL)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("the cluster is too small: CPU asked 7, there 6: lower placement.*_")
    assert [line.split()[:3] for line in lines if "rollout " in line] == [["rollout", "7", "1"]]
    assert sum("gpu_small 1" in line for line in lines) == 1
    assert time.monotonic() - started < AT_ONCE_S


def test_engines_too_wide_for_every_node_are_refused_though_the_sum_would_do(cluster):
    started = time.monotonic()
    wide = recipe("teacher.tensor_parallel=4", "run.device=cuda")
    with pytest.raises(PlacementError, match="teacher asks GPU 4 on one node, the most a node has"):
        Placement(wide, "cuda", ALL)
    with pytest.raises(PlacementError, match="too small: GPU asked 8, there 6"):
        Placement(recipe("student.num_ranks=6"), "cuda", ALL)
    with pytest.raises(PlacementError, match="coordinator goes to nodes with the resource nowhere"):
        Placement(recipe("placement.coordinator_on=nowhere"), "cpu", ALL)
    assert time.monotonic() - started < AT_ONCE_S


def test_roles_stand_on_the_nodes_they_name(cluster):
    said: list[str] = []
    placement = Placement(
        recipe(
            "rollout.num_workers=2",
            "placement.rollout_on=gpu_small",
            "placement.teacher_on=pool=big",
            "teacher.tensor_parallel=3",
            "student.num_ranks=1",
        ),
        "cuda",
        ALL,
        said.append,
    )
    small, big = cluster[1], cluster[2]
    assert [node for node, _ in stand(placement, "rollout")] == [small, small]
    assert [(node, sorted(gpus)) for node, gpus in stand(placement, "teacher")] == [
        (big, [0, 1, 2])
    ]
    assert stand(placement, "student")[0][0] == small  # the only GPU left
    (line,) = said
    assert line.startswith("places: ") and "student 0, rollout 0, rollout 1 on" in line
    placement.release()


def test_strict_strategies_hold_on_the_cluster(cluster):
    on_cpu = [f"placement.{role}_cpus=0.5" for role in ALL]
    apart = Placement(recipe("placement.strategy=strict_spread", *on_cpu), "cpu", ALL)
    assert len({stand(apart, role)[0][0] for role in ALL}) == 3
    apart.release()
    with pytest.raises(PlacementError, match=r"strict_spread puts 4 reserv.*pack or spread would"):
        Placement(
            recipe("placement.strategy=strict_spread", "rollout.num_workers=2", *on_cpu), "cpu", ALL
        )
    together = Placement(recipe("placement.strategy=strict_pack", *on_cpu), "cpu", ALL)
    assert len({stand(together, role)[0][0] for role in ALL}) == 1
    together.release()


def test_shared_gpus_are_dealt_by_their_place_in_the_bundle(cluster):
    shared = recipe(
        "placement.colocate=all",
        "teacher.tensor_parallel=2",
        "rollout.num_workers=4",
        "student.num_ranks=4",
    )
    placement = Placement(shared, "cuda", ALL)
    (teacher,) = placement.slots("teacher")
    rollouts = [slot.gpus for slot in placement.slots("rollout")]
    assert rollouts == [slot.gpus for slot in placement.slots("student")]
    assert teacher.gpus == rollouts[0] + rollouts[1]
    assert len(set(rollouts[0] + rollouts[1])) == len(set(rollouts[2] + rollouts[3])) == 2
    assert teacher.options["num_gpus"] == 0 and placement.shares("teacher")
    placement.release()


def test_a_busy_cluster_is_waited_for_and_who_holds_it_is_named(cluster, monkeypatch):
    monkeypatch.setattr("rock_opd.actors.placement.PATIENCE_S", 0.0)
    theirs = recipe("run.name=theirs", "placement.student_cpus=2", "student.num_ranks=3")
    holder = Placement(theirs, "cpu", ("student", "teacher"))
    mine = ["placement.student_cpus=1", "placement.student_on=gpu_small"]
    with pytest.raises(
        PlacementError,
        match=r"(?s)the actors: no room in run.start_timeout_s=3 s; in use are: "
        r".*CPU 0 of 2 free, by rock_opd:theirs-\w{6} \(CPU 2\)",
    ):
        Placement(recipe(*mine, "run.start_timeout_s=3"), "cpu", ALL)

    said: list[str] = []

    def release_when_told() -> None:
        while not said:
            time.sleep(0.1)
        holder.release()

    watcher = threading.Thread(target=release_when_told, daemon=True)
    watcher.start()
    placement = Placement(recipe(*mine, "run.start_timeout_s=120"), "cpu", ALL, said.append)
    watcher.join()
    assert said[0].startswith("the actors: waiting for room, up to 120 s; in use are: ")
    assert "rock_opd:theirs-" in said[0] and said[-1].startswith("places: ")
    placement.release()


def idle_class():
    class Idle:  # local, so that Ray ships it by value: actors cannot import the tests
        def progress(self, seen):
            return seen

        def where(self):
            import ray

            return ray.get_runtime_context().get_node_id()

    return Idle


def test_the_coordinator_stands_on_its_nodes_with_its_memory(cluster):
    almost = 2**28 - 64  # groups that are being given back may hold a byte an actor
    before = ray.available_resources()["memory"]
    actor = start_coordinator(
        idle_class(),
        recipe("placement.coordinator_on=pool=big", "placement.coordinator_memory_gb=0.25"),
        say=print,
        given_up=lambda: False,
    )
    assert ray.get(actor.where.remote(), timeout=60) == cluster[2]
    deadline = time.monotonic() + 30
    while before - ray.available_resources()["memory"] < almost and time.monotonic() < deadline:
        time.sleep(0.2)
    assert before - ray.available_resources()["memory"] >= almost
    ray.kill(actor)


def test_a_coordinator_whose_process_is_slow_to_start_is_not_said_to_lack_room(
    cluster, monkeypatch
):
    monkeypatch.setattr("rock_opd.actors.placement.PATIENCE_S", 0.0)

    class Slow:
        def __init__(self):
            import time

            time.sleep(6)

        def progress(self, seen):
            return seen

    said: list[str] = []
    actor = start_coordinator(Slow, recipe(), say=said.append, given_up=lambda: False)
    ray.kill(actor)
    assert said == ["the coordinator: waiting for a process to start, up to 60 s; there is room"]


def test_who_holds_what_is_told_in_the_same_order_every_time(cluster):
    half = "placement.student_cpus=0.5"
    held = [Placement(recipe(f"run.name={name}", half), "cpu", ("student",)) for name in "cab"]
    deadline = time.monotonic() + 30
    while sum(f"rock_opd:{name}-" in holders() for name in "abc") < 3:
        assert time.monotonic() < deadline  # what is free is told a moment late
        time.sleep(0.2)
    for _ in range(10):
        nodes = holders().split("; ")
        assert nodes == sorted(nodes)
        for node in nodes:
            names = re.findall(r"rock_opd:([abc])-", node)
            assert names == sorted(names)
    for placement in held:
        placement.release()


def test_a_run_that_cannot_be_held_starts_no_coordinator(cluster):
    started = time.monotonic()
    with pytest.raises(PlacementError, match=r"CPU asked 9, there 6"):
        start_coordinator(
            idle_class(),
            recipe("placement.student_cpus=1", "student.num_ranks=9"),
            say=print,
            given_up=lambda: False,
        )
    with pytest.raises(PlacementError, match=r"coordinator asks memory 90000.0 GB on one node"):
        start_coordinator(
            idle_class(),
            recipe("placement.coordinator_memory_gb=90000"),
            say=print,
            given_up=lambda: False,
        )
    assert time.monotonic() - started < AT_ONCE_S


def test_one_who_waits_for_the_coordinators_place_may_give_up(cluster):
    waiting = recipe("placement.coordinator_on=later", "placement.wait_for_nodes=true")
    said: list[str] = []
    assert (
        start_coordinator(idle_class(), waiting, say=said.append, given_up=lambda: bool(said))
        is None
    )
    assert said[0].startswith("the coordinator: waiting for room, up to 60 s; the cluster is too")


def test_one_who_waits_for_the_actors_places_may_stop(cluster):
    waiting = recipe("placement.student_on=later", "placement.wait_for_nodes=true")
    said: list[str] = []
    with pytest.raises(Stopped, match="the actors: stopped while waiting for room"):
        Placement(waiting, "cpu", ALL, said.append, lambda: bool(said))
    assert said[0].startswith("the actors: waiting for room")
