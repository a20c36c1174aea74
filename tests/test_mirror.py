"""The run's copy at an fsspec URI: what is there when, what of it is used again, what a failing
store means. The stores are fsspec's own ``file`` and ``memory``; the roles compute nothing."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rock_opd.checkpoint import list_checkpoints, load_checkpoint
from rock_opd.config import Recipe
from rock_opd.driver import settle_run_dir
from rock_opd.errors import ConfigError, DataError, StorageError
from rock_opd.findings import CheckReport
from rock_opd.mirror import Mirror, pull
from rock_opd.mirror_store import Store, holds_run, probe
from rock_opd.preflight import _check_mirror
from rock_opd.runlock import claim

sys.path.insert(0, str(Path(__file__).parent))
from test_coordinator import (
    Roles,
    coordinator,
    events,
    make_recipe,
    run_killed,
    same_run,
    saves_at_once,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def mirrored(folder: Path, store: Path | str, *overrides: str) -> Recipe:
    uri = store if isinstance(store, str) else store.as_uri()
    return make_recipe(folder, f"run.mirror={uri}", *saves_at_once(2), *overrides)


def settled(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """As `rock-opd train` does it, for a process that ends then."""
    said: list[str] = []
    found = settle_run_dir(recipe, say=said.append)
    claim(found.run_dir).release()
    return found, said


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def said(run) -> list[str]:
    return [line for line in run.progress.lines if isinstance(line, str) and "mirror" in line]


class Down(MemoryFileSystem):
    """A store that refuses whatever has one of these words in its name, for a while or for good."""

    protocol = "down"
    refused: tuple[str, ...] = ()
    times = 0
    hold: threading.Event | None = None
    cachable = False

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._ask(path)
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def put_file(self, lpath, rpath, **kwargs):
        if Down.hold is not None:
            Down.hold.wait(20)
        self._ask(rpath)
        return super().put_file(lpath, rpath, **kwargs)

    def _ask(self, path: str) -> None:
        if Down.times and any(word in path for word in Down.refused):
            Down.times -= 1
            raise RuntimeError("503 slow\ndown, Bearer abcdef123456")


@pytest.fixture
def down():
    fsspec.register_implementation("down", Down, clobber=True)
    Down.refused, Down.times, Down.hold = (), 0, None
    Down.store.clear()
    yield Down
    Down.refused, Down.times, Down.hold = (), 0, None
    Down.store.clear()


# ---------------------------------------------------------------- there


def test_a_mirror_holds_what_the_folder_does_and_is_pruned_like_it(tmp_path, store):
    recipe = mirrored(
        tmp_path, store, "checkpoint.save_hf_every=1", "log.registry_every=2", "run.num_steps=7"
    )
    run = coordinator(recipe, Roles())
    run.run()
    there, here = store / "t", recipe.run_dir
    for folder in ("checkpoints", "hf"):
        kept = [p.name for p in sorted((here / folder).iterdir())]
        assert [p.name for p in sorted((there / folder).iterdir())] == kept
    assert [s for s, _ in list_checkpoints(there)] == [6, 7]  # checkpoint.keep_last=2
    assert load_checkpoint(there).step == 7
    assert names(there / "registry") == names(here / "registry")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "model/updates"):
        assert (there / name).read_bytes() == (here / name).read_bytes()
    assert (there / "model" / "complete.json").exists()
    assert "journal" not in {p.name for p in there.iterdir()}
    pushed = [name for e in events(recipe, "mirror") for name in e["folders"]]
    assert {"checkpoints/step_000007", "hf/step_000007", "model"} <= set(pushed)
    assert len(pushed) == len(set(pushed)) and not said(run)


def test_a_kill_leaves_the_log_of_the_checkpoints_own_step_there(tmp_path, store):
    recipe = mirrored(tmp_path, store)
    run_killed(recipe, Roles(), in_step=6)
    deadline = time.monotonic() + 20
    while not (store / "t/checkpoints/step_000004/complete.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    log = store / "t/checkpoints/step_000004/log/metrics.jsonl"
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()][:4] == [1, 2, 3, 4]
    assert not (store / "t/summary.json").exists()


def test_a_push_does_not_hold_up_the_steps_and_what_it_reads_is_not_removed(tmp_path, down):
    down.hold = threading.Event()
    recipe = mirrored(tmp_path, "down://store", "checkpoint.every=1", "checkpoint.keep_last=1")
    run = coordinator(recipe, Roles())
    step, seen = run._step, []

    def watch(number: int) -> dict:
        values = step(number)
        seen.append([s for s, _ in list_checkpoints(recipe.run_dir)])
        if number == 6:
            down.hold.set()
        return values

    run._step = watch
    run.run()
    assert seen[-1] == [1, 5]  # 1 is being read all the time; 5 is what keep_last=1 keeps
    assert [s for s, _ in list_checkpoints(recipe.run_dir)] == [6]
    there = Store("down://store/t").files()
    assert {n.split("/")[1] for n in there if n.startswith("checkpoints/")} == {"step_000006"}


def test_a_push_that_fails_is_told_and_the_next_one_does_its_work(tmp_path, down):
    recipe = mirrored(tmp_path, "down://store")
    down.refused, down.times = ("step_000002/complete.json",), 1
    run = coordinator(recipe, Roles())
    step = run._step

    def slowly(number: int) -> dict:  # roles that compute nothing are faster than any store
        deadline = time.monotonic() + 20
        while run._keeper._mirror.busy and time.monotonic() < deadline:
            run._keeper.look()
            time.sleep(0.01)
        return step(number)

    run._step = slowly
    summary = run.run()
    assert summary["finished"]
    [line] = said(run)
    assert "down://store/t/checkpoints/step_000002/complete.json could not be written" in line
    assert "503 slow down, Bearer ***; it is tried again with the next checkpoint" in line
    failed, *whole = events(recipe, "mirror")
    assert "503" in failed["error"]
    assert [name for e in whole for name in e["folders"]] == [
        "checkpoints/step_000004",
        "checkpoints/step_000006",
        "model",
    ]


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_mirror_that_fails_to_the_end_is_an_error_there_and_not_before(tmp_path, down, on_error):
    down.refused, down.times = ("checkpoints/",), 10_000
    recipe = mirrored(tmp_path, "down://store", f"checkpoint.on_error={on_error}")
    run = coordinator(recipe, Roles())
    if on_error == "stop":
        with pytest.raises(StorageError, match=r"503.*3 attempts.*own folder is whole: resume="):
            run.run()
    else:
        assert run.run()["finished"]
        assert "going on (checkpoint.on_error=warn)" in said(run)[-1]
    assert json.loads((recipe.run_dir / "summary.json").read_text())["finished"]
    down.times = 0
    again = mirrored(tmp_path, "down://store", "resume=true")
    coordinator(again, Roles()).run()
    assert "checkpoints/step_000006/complete.json" in Store("down://store/t").files()


def test_a_push_that_does_not_end_is_given_up_after_the_limit(tmp_path, down):
    down.hold = threading.Event()
    recipe = mirrored(tmp_path, "down://store", "run.phase_timeout_s=1", "run.num_steps=2")
    with pytest.raises(StorageError, match=r"not up to date after 1 s, see run.phase_timeout_s"):
        coordinator(recipe, Roles()).run()
    down.hold.set()


def test_a_folder_that_cannot_be_written_is_one_line_without_a_trace(tmp_path, store):
    store.write_text("a file where the mirror should be")
    recipe = mirrored(tmp_path, store, "checkpoint.on_error=warn")
    run = coordinator(recipe, Roles())
    assert run.run()["finished"]
    assert all("could not be written: " in line and "\n" not in line for line in said(run))


def test_who_lost_the_mirror_to_another_process_writes_no_more(tmp_path, store):
    recipe = mirrored(tmp_path, store)
    coordinator(recipe, Roles()).run()
    first = Mirror(recipe, resume_step=6)
    first.finish(6, timeout_s=20, tell=lambda pushed: None)
    second = Mirror(recipe, resume_step=6)
    second.finish(6, timeout_s=20, tell=lambda pushed: None)
    with pytest.raises(StorageError, match=r"belongs to another process since .* goes on there"):
        first.finish(6, timeout_s=20, tell=lambda pushed: None)
    second.finish(6, timeout_s=20, tell=lambda pushed: None)


# ---------------------------------------------------------------- and back


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_run_resumed_from_its_mirror_equals_the_uninterrupted_one(tmp_path, where, down):
    place = "down://store" if where == "memory" else tmp_path / "store"
    settings = ("log.occurrences=true", "log.registry_every=1", "eval.num_heldout=2")
    one = coordinator(mirrored(tmp_path / "whole", tmp_path / "other", *settings), Roles())
    one.run()
    first = mirrored(tmp_path / "a", place, *settings, "run.stop_after=4")
    coordinator(first, Roles()).run()
    shutil.rmtree(tmp_path / "a")

    # another machine: nothing there but the recipe
    again, told = settled(mirrored(tmp_path / "b", place, *settings, "resume=true"))
    assert told == [f"step 4 comes from the mirror {first.run.mirror}/t"]
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    for folder in ("registry", "occurrences"):
        ours, theirs = again.run_dir / folder, one.recipe.run_dir / folder
        assert names(ours) == names(theirs) and len(names(ours)) == 6
    assert [e["step"] for e in events(again, "checkpoint")] == [2, 4, 6]
    assert [e["step"] for e in events(again, "resume")] == [4]


def make_mirror(tmp_path: Path, store: Path) -> Recipe:
    """A mirror with steps 2 and 4, and no local folder; the recipe that goes on."""
    coordinator(mirrored(tmp_path / "a", store, "run.stop_after=4"), Roles()).run()
    shutil.rmtree(tmp_path / "a")
    assert [s for s, _ in list_checkpoints(store / "t")] == [2, 4]
    return mirrored(tmp_path / "b", store, "resume=true")


def no_seal(folder: Path) -> None:
    (folder / "complete.json").unlink()


def torn_seal(folder: Path) -> None:
    (folder / "complete.json").write_text('{"files": {"')


def deep_seal(folder: Path) -> None:
    (folder / "complete.json").write_text("[" * 100_000)


def no_object(folder: Path) -> None:
    (folder / "complete.json").write_text("[]")


def changed(folder: Path) -> None:
    path = folder / "state.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def lost(folder: Path) -> None:
    (folder / "student" / "updates").unlink()


def outside(folder: Path) -> None:
    seal = json.loads((folder / "complete.json").read_text())
    seal["files"]["../../../../escaped"] = [0, ""]
    (folder / "complete.json").write_text(json.dumps(seal))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (no_seal, None),
        (torn_seal, "complete.json cannot be read"),
        (deep_seal, "complete.json cannot be read"),
        (no_object, "complete.json cannot be read"),
        (changed, "state.npz was changed after it was written"),
        (lost, "student/updates is missing"),
        (outside, "names files outside the folder"),
    ],
)
def test_a_torn_checkpoint_of_the_mirror_is_refused_and_the_one_before_is_used(
    tmp_path, store, damage, why
):
    one = coordinator(mirrored(tmp_path / "whole", tmp_path / "other"), Roles())
    one.run()
    recipe = make_mirror(tmp_path, store)
    damage(store / "t/checkpoints/step_000004")
    again, told = settled(recipe)
    assert [line for line in told if "step_000004" in line and (why or "") in line] == told[:-1]
    assert len(told) == (1 if why is None else 2)
    assert told[-1].startswith("step 2 comes from the mirror")
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    # the torn one is written anew, and everything there is whole again
    assert [s for s, _ in list_checkpoints(store / "t")] == [4, 6]
    assert not (tmp_path / "escaped").exists()


def test_a_mirror_with_nothing_whole_is_an_error_that_says_why_and_leaves_no_folder(
    tmp_path, store
):
    recipe = make_mirror(tmp_path, store)
    for step in (2, 4):
        changed(store / f"t/checkpoints/step_00000{step}")
    with pytest.raises(DataError, match=r"no checkpoint at file:.*step_000004 is.*step_000002 is"):
        settle_run_dir(recipe)
    assert not recipe.run_dir.exists() or names(recipe.run_dir) == []


def test_the_folder_wins_unless_the_mirror_is_ahead_and_nothing_is_mixed(tmp_path, store):
    local = mirrored(tmp_path / "a", store, "run.stop_after=2")
    coordinator(local, Roles()).run()
    same, told = settled(mirrored(tmp_path / "a", store, "resume=true", "run.stop_after=2"))
    assert told == [] and load_checkpoint(same.run_dir).step == 2

    elsewhere, told = settled(mirrored(tmp_path / "b", store, "resume=true", "run.stop_after=5"))
    assert told[0].startswith("step 2 comes from the mirror")
    coordinator(elsewhere, Roles()).run()

    before = names(local.run_dir)
    back, [line] = settled(mirrored(tmp_path / "a", store, "resume=true"))
    aside = local.run_dir / "before_mirror"
    assert line.startswith("step 5 comes from the mirror") and str(aside) in line
    assert names(aside) == before and load_checkpoint(back.run_dir).step == 5
    two = coordinator(back, Roles())
    two.run()
    one = coordinator(mirrored(tmp_path / "whole", tmp_path / "other"), Roles())
    one.run()
    same_run(one, two)


@pytest.mark.parametrize("steps", [(4,), (2, 4)])
def test_where_the_folders_newest_is_damaged_the_mirrors_of_the_same_step_serves(
    tmp_path, store, steps
):
    one = coordinator(mirrored(tmp_path / "whole", tmp_path / "other"), Roles())
    one.run()
    local = mirrored(tmp_path / "a", store, "run.stop_after=4")
    coordinator(local, Roles()).run()
    for step in steps:
        changed(local.run_dir / "checkpoints" / f"step_00000{step}")
    again, [line] = settled(mirrored(tmp_path / "a", store, "resume=true"))
    had = "step 2" if steps == (4,) else "no whole checkpoint"
    assert line.startswith("step 4 comes from the mirror") and f"folder had {had}," in line
    two = coordinator(again, Roles())
    two.run()
    same_run(one, two)
    assert (local.run_dir / "before_mirror/checkpoints/step_000004").is_dir()


def test_a_life_that_goes_on_from_an_older_step_replaces_what_the_newer_one_left(tmp_path, store):
    # The mirror's newest is whole, but the run goes on without it: its folder was put back by hand.
    recipe = mirrored(tmp_path / "a", store, "run.stop_after=2")
    coordinator(recipe, Roles()).run()
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    coordinator(mirrored(tmp_path / "a", store, "resume=true", "run.stop_after=5"), Roles()).run()
    assert [s for s, _ in list_checkpoints(store / "t")] == [4, 5]
    old = mirrored(tmp_path / "kept", store, "resume=true", "run.stop_after=2")
    coordinator(old, Roles()).run()
    # nothing of its own yet: what is there stays
    assert [s for s, _ in list_checkpoints(store / "t")][-1] == 5
    old = mirrored(tmp_path / "kept", store, "resume=true", "run.stop_after=3")
    coordinator(old, Roles()).run()
    assert [s for s, _ in list_checkpoints(store / "t")] == [2, 3]
    assert len((store / "t/metrics.jsonl").read_text().splitlines()) == 3


def test_a_new_run_is_not_begun_over_another_ones_mirror(tmp_path, store):
    make_mirror(tmp_path, store)
    fresh = mirrored(tmp_path / "c", store)
    with pytest.raises(ConfigError, match=r"already holds a run named t: go on with resume=true"):
        settle_run_dir(fresh)
    assert not fresh.run_dir.exists()
    assert settled(mirrored(tmp_path / "c", store, "run.on_existing=new"))[0].run.name == "t-2"
    assert not holds_run(mirrored(tmp_path / "c", store, "run.name=t-2"))


def test_a_mirror_that_holds_nothing_has_nothing_to_resume(tmp_path, store):
    with pytest.raises(ConfigError, match=r"holds no run, nor does file:.* one of its name"):
        settle_run_dir(mirrored(tmp_path, store, "resume=true"))


def test_the_best_student_comes_back_only_whole(tmp_path, store):
    recipe = make_mirror(tmp_path, store)
    settled(recipe)
    (recipe.run_dir / "best").mkdir()
    (recipe.run_dir / "best" / "weights").write_text("sound")
    Mirror(recipe, resume_step=4).finish(4, timeout_s=20, tell=lambda pushed: None)
    shutil.rmtree(recipe.run_dir)
    claim(recipe.run_dir)
    pull(recipe)
    assert names(recipe.run_dir / "best") == ["weights"]
    claim(recipe.run_dir).release()
    shutil.rmtree(recipe.run_dir)
    (store / "t/best/weights").write_text("torn!")
    claim(recipe.run_dir)
    pull(recipe)
    claim(recipe.run_dir).release()
    assert not (recipe.run_dir / "best").exists()


def test_a_pull_cut_off_is_begun_again(tmp_path, store):
    recipe = make_mirror(tmp_path, store)
    (recipe.run_dir / "pulled.partial" / "checkpoints").mkdir(parents=True)
    (recipe.run_dir / "config.yaml").write_text("moved in before the kill")
    again, told = settled(recipe)
    assert load_checkpoint(again.run_dir).step == 4 and len(told) == 1
    assert not (recipe.run_dir / "pulled.partial").exists()


# ---------------------------------------------------------------- before the run


def test_check_writes_and_removes_a_file(tmp_path, store):
    recipe = mirrored(tmp_path, store)
    assert probe(recipe).endswith("takes, gives and removes a file")
    assert names(store) == []
    report = CheckReport()
    _check_mirror(report, recipe, static=True)
    make_mirror(tmp_path, store)
    _check_mirror(report, recipe, static=False)
    store_file = tmp_path / "plain"
    store_file.write_text("")
    _check_mirror(report, mirrored(tmp_path, store_file), static=False)
    assert [f.level for f in report.findings] == ["info", "ok", "fail"]
    assert "holds a run of this name" in report.findings[1].text


@pytest.mark.parametrize("where", ["", "t", "t/checkpoints"])
def test_a_mirror_is_not_the_runs_own_folder(tmp_path, where):
    with pytest.raises(ConfigError, match=r"are one; name another disk"):
        probe(mirrored(tmp_path, tmp_path / where))


def test_every_name_of_a_store_is_relative_whatever_its_root(tmp_path, down):
    for uri in ("down://", "down://a", "down://a/b/", (tmp_path / "s").as_uri()):
        store = Store(uri if uri.endswith("/") else uri + "/")
        store.put_bytes(b"12345", "x/y.json")
        assert store.files()["x/y.json"] == 5 and store.read("x/y.json") == b"12345"
        store.remove_folder("x")
        store.remove("x/y.json")
        assert "x/y.json" not in store.files()
