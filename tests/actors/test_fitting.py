"""Which clusters can hold what: against every assignment there is, and in the words a person reads.
No Ray."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from rock_opd.actors.fitting import GIB, Need, Node, can_hold, node_group, table, why_not

STRATEGIES = ("pack", "spread", "strict_pack", "strict_spread")


def gpus(num: int, role: str = "teacher", **more: float) -> Need:
    return Need(role=role, resources={"GPU": num, **more})


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> Node:
    return Node(name=name, resources=resources, labels=labels or {})


def test_sums_are_not_enough():
    """Two 4-GPU engines, six GPUs on two nodes of three: neither fits; 8 GPUs as 3+5: one does."""
    two = [gpus(4), gpus(4)]
    assert not can_hold(two, [node("a", GPU=3), node("b", GPU=3)], strategy="pack")
    assert not can_hold(two, [node("a", GPU=3), node("b", GPU=5)], strategy="pack")
    assert can_hold(two, [node("a", GPU=4), node("b", GPU=5)], strategy="pack")
    # Three twos on two nodes of three: the sum is six, and each fits, but not all.
    assert not can_hold([gpus(2)] * 3, [node("a", GPU=3), node("b", GPU=3)], strategy="pack")


def test_a_way_that_first_fit_misses_is_found():
    """5 and 7 on a node of 12, the three 4s on the other; first fit puts 7 + 4 and is stuck."""
    needs = [gpus(n) for n in (7, 5, 4, 4, 4)]
    assert can_hold(needs, [node("a", GPU=12), node("b", GPU=12)], strategy="pack")


def test_strict_strategies_mean_what_ray_means_by_them():
    nodes = [node("a", CPU=3), node("b", CPU=2)]
    ones = [Need(role="rollout", resources={"CPU": 1})] * 3
    assert can_hold(ones, nodes, strategy="strict_pack")
    assert not can_hold([*ones, *ones[:1]], nodes, strategy="strict_pack")
    assert can_hold(ones[:2], nodes, strategy="strict_spread")
    assert not can_hold(ones, nodes, strategy="strict_spread")
    # The coordinator is no part of the group: it may stand beside any of them.
    beside = [Need(role="coordinator", resources={"CPU": 1})]
    assert can_hold(ones[:2], nodes, strategy="strict_spread", beside=beside)
    assert can_hold(ones, nodes, strategy="strict_pack", beside=[*beside, *beside])
    assert not can_hold(ones, nodes, strategy="strict_pack", beside=beside * 3)


def test_node_groups_are_kept():
    small = node("a", CPU=4, gpu_small=1)
    big = node("b", CPU=4, labels={"pool": "big"})
    resources, labels = node_group("gpu_small")
    on_small = Need(role="rollout", resources={"CPU": 3, **resources}, labels=labels)
    resources, labels = node_group("pool=big")
    on_big = Need(role="teacher", resources={"CPU": 3, **resources}, labels=labels)
    assert can_hold([on_small, on_big], [small, big], strategy="pack")
    assert not can_hold([on_small, on_small], [small, big], strategy="pack")
    assert not can_hold([on_big], [small], strategy="pack")
    assert not can_hold([on_small, on_big], [small, big], strategy="strict_pack")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_answer_is_that_of_trying_every_assignment(strategy):
    rng = random.Random(7)
    answers = []
    for _ in range(150):
        nodes = [
            node(
                f"n{i}",
                GPU=rng.randint(0, 4),
                CPU=rng.randint(1, 4),
                labels={"pool": rng.choice("xy")},
                **({"mark": 1} if rng.random() < 0.5 else {}),
            )
            for i in range(rng.randint(1, 3))
        ]
        needs = [
            Need(
                role="r",
                resources={
                    "CPU": rng.choice((0.5, 1, 2)),
                    **rng.choice(({}, {"GPU": 1}, {"GPU": 2})),
                    **rng.choice(({}, {}, {"mark": 0.001})),
                },
                labels=rng.choice(({}, {}, {"pool": "x"})),
            )
            for _ in range(rng.randint(1, 5))
        ]
        num_beside = rng.randint(0, min(1, len(needs) - 1))
        group, beside = needs[num_beside:], needs[:num_beside]
        got = can_hold(group, nodes, strategy=strategy, beside=beside)
        assert got == by_hand(group, beside, nodes, strategy)
        answers.append(got)
    assert 20 < sum(answers) < 130


def by_hand(group: list[Need], beside: list[Need], nodes: list[Node], strategy: str) -> bool:
    for places in itertools.product(range(len(nodes)), repeat=len(group) + len(beside)):
        homes = places[: len(group)]
        if strategy == "strict_pack" and len(set(homes)) > 1:
            continue
        if strategy == "strict_spread" and len(set(homes)) < len(homes):
            continue
        fits = True
        for i, there in enumerate(nodes):
            here = [n for n, at in zip([*group, *beside], places, strict=True) if at == i]
            fits &= all(there.labels.get(k) == v for n in here for k, v in n.labels.items())
            for kind in ("CPU", "GPU", "mark"):
                asked = sum(n.resources.get(kind, 0) for n in here)
                fits &= asked <= there.resources.get(kind, 0) + 1e-9
        if fits:
            return True
    return False


def test_a_large_cluster_is_answered_in_seconds():
    nodes = [node(f"n{i}", GPU=8, CPU=96) for i in range(128)]
    needs = [gpus(8, CPU=8)] * 64 + [gpus(1, "student", CPU=4)] * 512
    started = time.monotonic()
    assert can_hold(needs, nodes, strategy="pack")
    assert not can_hold([*needs, gpus(1)], nodes, strategy="pack")
    assert can_hold([gpus(4)] * 256, nodes, strategy="pack")
    assert not can_hold([gpus(5)] * 140, nodes, strategy="pack")
    assert time.monotonic() - started < 20


def test_what_is_in_the_way_is_named_with_what_to_change():
    nodes = [node("10.0.0.1 ab12cd", CPU=8, GPU=3), node("10.0.0.2 cd34ef", CPU=8, GPU=3)]
    (text,) = why_not([gpus(4), gpus(2)], nodes, strategy="pack")
    assert text.startswith("teacher asks GPU 4 on one node, the most a node has is 3: lower tensor")
    (text,) = why_not([gpus(3)] * 3, nodes, strategy="pack")
    assert text.startswith("GPU asked 9, there 6: lower") and text.endswith("or add nodes")
    (text,) = why_not([gpus(1)] * 3, nodes, strategy="strict_spread")
    assert "3 reservations on as many nodes; placement.strategy=pack or spread would fit" in text
    (text,) = why_not([gpus(2)] * 3, nodes, strategy="pack")
    assert "does not divide over these nodes" in text
    marked = Need(role="rollout", resources={"CPU": 1, "gpu_small": 0.001})
    (text,) = why_not([marked], [*nodes, node("c", CPU=1, gpu_big=1)], strategy="pack")
    assert "(nodes offer: gpu_big)" in text
    assert """ray start --resources='{"gpu_small": 1}', or change placement.rollout_on""" in text
    labelled = Need(role="student", resources={"CPU": 1}, labels={"pool": "x"})
    (text,) = why_not([labelled], nodes, strategy="pack")
    assert "the label pool=x, and there is none: start one with ray start --labels='pool=x'" in text
    memory = Need(role="coordinator", resources={"memory": 64 * GIB})
    text, total = why_not([], [node("a", memory=16 * GIB)], strategy="pack", beside=[memory])
    assert "coordinator asks memory 64.0 GB on one node, the most a node has is 16.0 GB" in text
    assert total.startswith("memory asked 64.0 GB, there 16.0 GB: lower placement.coordinator_mem")


def test_the_table_shows_roles_and_nodes():
    lines = table(
        [
            gpus(4, CPU=2),
            gpus(4, CPU=2),
            Need(role="rollout", resources={"CPU": 1, "small": 0.001}),
        ],
        [node("10.0.0.1 ab12cd", CPU=8, GPU=3, memory=GIB, labels={"pool": "x"}, small=1)],
        beside=[Need(role="coordinator", resources={"memory": 2 * GIB})],
    ).splitlines()
    assert [line.split() for line in lines if line] == [
        ["asked", "by", "times", "CPU", "each", "GPU", "each", "memory", "on", "nodes", "with"],
        ["coordinator", "1", "0", "0", "2.0", "GB", "-"],
        ["teacher", "2", "2", "4", "-", "-"],
        ["rollout", "1", "1", "0", "-", "small"],
        ["node", "CPU", "GPU", "memory", "offers"],
        ["10.0.0.1", "ab12cd", "8", "3", "1.0", "GB", "small", "1,", "pool=x"],
    ]
