"""The trainer ``rock_opd``: verl's folders, loggers and resume modes, and a whole ``main_ppo``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from verl_configs import compose, distillation_args

from rock_opd.checkpoint import list_checkpoints, seal
from rock_opd.config import Recipe
from rock_opd.core.alarms import FIXED
from rock_opd.driver import START_ATTEMPTS
from rock_opd.durable import file_facts
from rock_opd.errors import ConfigError, DataError, RockOPDError
from rock_opd.integrations.verl.checkpoints import StepFolders, settle_resume
from rock_opd.integrations.verl.recipe import epochs_cover, recipe_from_verl
from rock_opd.integrations.verl.rows import RowFollower
from rock_opd.recipe_file import recipe_yaml
from rock_opd.runlock import claim

OPTIM = "actor_rollout_ref.actor.optim"
HF = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


def make_recipe(folder: Path, tiny: Path, *more: str) -> Recipe:
    args = distillation_args(folder, student=tiny / "student", teacher=tiny / "teacher")
    return recipe_from_verl(compose([*args, *more]))


def save(recipe: Recipe, step: int, content: str = "weights") -> Path:
    """A sealed checkpoint, as the run's saver leaves it."""
    folder = recipe.run_dir / "checkpoints" / f"step_{step:06d}"
    (folder / "student").mkdir(parents=True)
    (folder / "student" / "rank.bin").write_text(content)
    (folder / "state.json").write_text("{}")
    names = ("student/rank.bin", "state.json")
    seal(folder, step, {name: file_facts(folder / name) for name in names})
    (recipe.run_dir / "config.yaml").write_text(recipe_yaml(recipe))
    return folder


def model_copy(recipe: Recipe, step: int) -> None:
    folder = recipe.run_dir / "hf" / f"step_{step:06d}"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)


def let_go(recipe: Recipe) -> None:
    """As the end of the process that ran it would."""
    claim(recipe.run_dir).release()


# --- folders --------------------------------------------------------------------------------------


def test_a_checkpoint_has_verls_layout_and_is_not_written_twice(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    ours = save(recipe, 3)
    assert StepFolders(recipe).publish() == [(3, tmp_path / "global_step_3")]
    actor = tmp_path / "global_step_3" / "actor"
    assert (actor / "student" / "rank.bin").samefile(ours / "student" / "rank.bin")
    names = {file.name for file in (actor / "huggingface").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_3")


def test_transformers_loads_config_and_tokenizer_of_the_folder(tmp_path, tiny_models):
    from transformers import AutoConfig, AutoTokenizer

    recipe = make_recipe(tmp_path, tiny_models)
    save(recipe, 1)
    StepFolders(recipe).publish()
    folder = tmp_path / "global_step_1" / "actor" / "huggingface"
    assert AutoConfig.from_pretrained(folder).vocab_size == 1024
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<|im_end|>"


def test_a_folder_with_weights_waits_for_them(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models, HF)
    save(recipe, 1)
    folders = StepFolders(recipe)
    assert folders.publish() == []
    model_copy(recipe, 1)
    assert folders.publish() == [(1, tmp_path / "global_step_1")]
    weights = tmp_path / "global_step_1" / "actor" / "huggingface" / "model.safetensors"
    assert weights.samefile(recipe.run_dir / "hf" / "step_000001" / "model.safetensors")


def test_a_folder_goes_with_the_checkpoint_that_the_run_pruned(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    folders = StepFolders(recipe)
    for step in (1, 2):
        save(recipe, step)
        folders.publish()
    shutil.rmtree(recipe.run_dir / "checkpoints" / "step_000001")
    mine = tmp_path / "global_step_7"  # somebody's: none of this run's
    mine.mkdir()
    folders.publish()
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == [
        *("global_step_2", "global_step_7"),
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


# --- resume ---------------------------------------------------------------------------------------


def test_auto_starts_where_there_is_nothing_and_goes_on_where_there_is(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    assert not settle_resume(recipe, mode="auto", path=None).resume
    save(recipe, 1)
    assert settle_resume(recipe, mode="auto", path=None).resume
    let_go(recipe)


def test_auto_goes_on_from_a_folder_that_was_moved_here_without_its_run(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path / "there", tiny_models)
    save(recipe, 4)
    StepFolders(recipe).publish()
    here = replace(recipe, run=replace(recipe.run, dir=str(tmp_path / "here")))
    (tmp_path / "here").mkdir()
    for name in ("global_step_4", "latest_checkpointed_iteration.txt"):
        shutil.move(tmp_path / "there" / name, tmp_path / "here" / name)
    assert settle_resume(here, mode="auto", path=None).resume
    [(step, path)] = list_checkpoints(here.run_dir)
    assert step == 4 and sorted(p.name for p in path.iterdir()) == [
        *("complete.json", "state.json", "student"),
    ]
    let_go(here)


def test_resume_path_goes_back_to_an_earlier_step_and_keeps_the_later_folder(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    for step in (1, 2, 3):
        save(recipe, step, f"weights of {step}")
    StepFolders(recipe).publish()
    path = str(tmp_path / "global_step_2")
    assert settle_resume(recipe, mode="resume_path", path=path).resume
    assert [step for step, _ in list_checkpoints(recipe.run_dir)] == [1, 2]
    later = tmp_path / "global_step_3" / "actor" / "student" / "rank.bin"
    assert later.read_text() == "weights of 3"
    # When the run comes to step 3 again, its folder is the new one.
    save(recipe, 3, "weights of 3, again")
    StepFolders(recipe).publish()
    assert later.read_text() == "weights of 3, again"
    let_go(recipe)


def test_a_damaged_folder_is_refused_and_nothing_of_the_run_goes(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    for step in (1, 2, 3):
        save(recipe, step, f"weights of {step}")
    StepFolders(recipe).publish()
    path = tmp_path / "global_step_2"
    (path / "actor" / "student" / "rank.bin").write_text("weights of 9")
    with pytest.raises(DataError, match=r"resume_from_path: .*_2 .*rank.bin was changed"):
        settle_resume(recipe, mode="resume_path", path=str(path))
    assert [step for step, _ in list_checkpoints(recipe.run_dir)] == [1, 2, 3]
    let_go(recipe)


def test_a_damaged_folder_is_made_anew_when_the_run_comes_to_the_very_same_step(
    tmp_path, tiny_models
):
    recipe = make_recipe(tmp_path, tiny_models)
    checkpoint = save(recipe, 2)
    StepFolders(recipe).publish()
    file = tmp_path / "global_step_2" / "actor" / "student" / "rank.bin"
    file.write_text("otherwise")  # in the run's own, too: it is one file
    checkpoint.rename(checkpoint.with_name("step_000002.damaged"))
    save(recipe, 2)
    assert StepFolders(recipe).publish() == [(2, tmp_path / "global_step_2")]
    assert file.read_text() == "weights"


def test_disable_starts_over_and_moves_the_run_before_aside(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    save(recipe, 1)
    assert not settle_resume(recipe, mode="disable", path=None).resume
    assert not recipe.run_dir.exists()
    assert list_checkpoints(tmp_path / "rock_opd.1")[0][0] == 1


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models)
    (tmp_path / "global_step_5" / "actor").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(ConfigError, match="global_step_5 is no checkpoint of rock_opd"):
        settle_resume(recipe, mode="auto", path=None)
    with pytest.raises(ConfigError, match="expected a folder named global_step_N"):
        settle_resume(recipe, mode="resume_path", path=str(tmp_path / "elsewhere"))
    let_go(recipe)


def test_steps_beyond_the_epochs_are_refused(tmp_path, tiny_models):
    recipe = make_recipe(tmp_path, tiny_models, "trainer.total_training_steps=5")
    epochs_cover(recipe, 5)
    with pytest.raises(ConfigError, match=r"num_epochs=1 .* set run\.num_epochs=3"):
        epochs_cover(recipe, 2)


# --- the trainer itself ---------------------------------------------------------------------------


def make_trainer(folder: Path, tiny: Path, *more: str):
    from rock_opd.integrations.verl.trainer import RockOPDTrainer

    verl_rows(folder / "train.parquet", tiny, 16)
    args = distillation_args(
        folder,
        student=tiny / "student",
        teacher=tiny / "teacher",
        train_files=folder / "train.parquet",
    )
    return RockOPDTrainer(compose([*args, *more]))


def test_the_warm_up_is_counted_in_the_steps_that_the_data_gives(tmp_path, tiny_models):
    trainer = make_trainer(tmp_path, tiny_models, f"{OPTIM}.lr_warmup_steps_ratio=0.3")
    trainer.init()
    let_go(trainer.recipe)
    assert trainer.recipe.optim.warmup_ratio == 1 / 4  # int(0.3 x 4 steps)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_prompt_length=4", "(data.filter_overlong_prompts=true leaves such rows out)"),
        ("data.max_response_length=100000", "(data.max_prompt_length + the longest answer)"),
        ("trainer.total_training_steps=5", "trainer.total_epochs=1 is not supported"),
        (
            "+rock_opd.run.num_steps=5",
            "of +rock_opd.run.num_steps=5 steps; set trainer.total_epochs=2",
        ),
    ],
)
def test_an_error_after_the_config_was_accepted_names_verls_keys_too(
    override, said, tmp_path, tiny_models
):
    trainer = make_trainer(tmp_path, tiny_models, override, "data.filter_overlong_prompts=false")
    with pytest.raises(RockOPDError) as error:
        trainer.init()
    assert said in str(error.value)


def test_an_alarm_names_verls_keys(tmp_path, tiny_models, capsys):
    trainer = make_trainer(tmp_path, tiny_models)
    trainer._say(f"step 4: alarm: {FIXED['rollout/truncated_share'][1]}")
    assert "limit: raise data.max_response_length, or" in capsys.readouterr().out


# --- loggers --------------------------------------------------------------------------------------


class Sink:
    """verl's ``Tracking`` with two loggers that keep what they are given."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, dict]]] = {"console": [], "file": []}

    def log(self, data, step, backend=None) -> None:
        for name, rows in self.rows.items():
            if backend is None or name in backend:
                rows.append((step, data))

    def steps(self, name: str = "console") -> list[int]:
        return [step for step, _ in self.rows[name]]


def write_rows(recipe: Recipe, steps, *, anew: bool = False) -> None:
    recipe.run_dir.mkdir(parents=True, exist_ok=True)
    path = recipe.run_dir / "metrics.jsonl"
    text = "" if anew or not path.exists() else path.read_text()
    text += "".join(
        json.dumps(
            {
                "step": s,
                "train/loss": s / 10,
                "train/lr": 1e-3,
                "train/kl_mean": None,
                "rollout/num_tokens": 12,
                "rollout/num_responses": 4,
            }
        )
        + "\n"
        for s in steps
    )
    if anew:
        path.unlink(missing_ok=True)
    path.write_text(text)


def test_a_step_is_logged_once_under_verls_names_and_ours(tmp_path, tiny_models):
    recipe, sink = make_recipe(tmp_path, tiny_models), Sink()
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=0)
    rows.follow()
    write_rows(recipe, [1])
    rows.follow()
    rows.follow()
    write_rows(recipe, [2, 3])
    rows.finish()
    assert sink.steps() == [1, 2, 3]
    data = sink.rows["console"][2][1]
    assert data["train/loss"] == data["actor/loss"] == 0.3
    assert data["training/global_step"] == 3 and data["training/epoch"] == 1
    assert data["response_length/mean"] == 3.0
    assert "train/kl_mean" not in data  # undefined: TensorBoard takes no null


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path, tiny_models):
    recipe, sink = make_recipe(tmp_path, tiny_models), Sink()
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=0)
    write_rows(recipe, [1])
    path = recipe.run_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "train/lo')
    rows.follow()
    assert sink.steps() == [1]
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    rows.follow()
    assert sink.steps() == [1, 2]


def test_steps_done_again_after_a_restart_inside_the_run_are_not_logged_again(
    tmp_path, tiny_models
):
    recipe, sink = make_recipe(tmp_path, tiny_models), Sink()
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=0)
    write_rows(recipe, [1, 2, 3])
    rows.follow()
    write_rows(recipe, [1], anew=True)  # cut back to the checkpoint
    rows.follow()
    write_rows(recipe, [2, 3, 4])
    rows.follow()
    assert sink.steps() == [1, 2, 3, 4]


def test_after_a_resume_the_file_logger_has_every_step_and_the_others_the_new_ones(
    tmp_path, tiny_models
):
    """verl's ``file`` logger begins its file anew; wandb and its like go on with theirs."""
    recipe, sink = make_recipe(tmp_path, tiny_models), Sink()
    write_rows(recipe, [1, 2, 3])  # 3 lies beyond the checkpoint, and will be done again
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=2)
    write_rows(recipe, [1, 2], anew=True)
    rows.follow()
    write_rows(recipe, [3, 4])
    rows.finish()
    assert sink.steps("file") == [1, 2, 3, 4] and sink.steps("console") == [3, 4]


def test_a_step_that_is_evaluated_is_logged_with_its_accuracy(tmp_path, tiny_models):
    problems = tiny_models / "problems.jsonl"
    recipe = make_recipe(tmp_path, tiny_models, "trainer.test_freq=2", f"data.val_files={problems}")
    assert recipe.eval.problems == str(problems)
    sink = Sink()
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=0)
    write_rows(recipe, [1, 2])
    rows.follow()
    assert sink.steps() == [1]  # 2 is not graded yet
    (recipe.run_dir / "events.jsonl").write_text(
        json.dumps({"event": "evaluate", "step": 2, "accuracy": 0.25}) + "\n"
    )
    rows.follow()
    assert sink.steps() == [1, 2]
    assert sink.rows["console"][1][1]["val-core/math_verify/acc/mean@1"] == 0.25


def test_the_last_step_is_logged_with_the_accuracy_at_the_end(tmp_path, tiny_models):
    problems = tiny_models / "problems.jsonl"
    recipe = make_recipe(tmp_path, tiny_models, "trainer.test_freq=3", f"data.val_files={problems}")
    sink = Sink()
    rows = RowFollower(recipe, sink, steps_per_epoch=2, num_steps=4, done=0)
    write_rows(recipe, [1, 2])
    rows.follow()
    grades = [json.dumps({"event": "evaluate", "step": s, "accuracy": s / 8}) for s in (3, 4)]
    (recipe.run_dir / "events.jsonl").write_text(grades[0] + "\n")
    write_rows(recipe, [3, 4])
    rows.follow()
    assert sink.steps() == [1, 2, 3]  # 4 is not graded yet
    (recipe.run_dir / "events.jsonl").write_text("\n".join(grades) + "\n")
    rows.finish()
    assert [data.get("val-core/math_verify/acc/mean@1") for _, data in sink.rows["console"]] == [
        *(None, None, 0.375, 0.5),
    ]


# --- the whole of it ------------------------------------------------------------------------------

LIMIT_S = 900


def verl_rows(path: Path, tiny: Path, num: int) -> None:
    """Rows as verl's data preparation writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text().splitlines()]
    rows = [
        {
            "data_source": "tiny",
            "prompt": row["messages"],
            "ability": "chat",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "split": "train"},
        }
        for i, row in enumerate(prompts[:num])
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def main_ppo(folder: Path, tiny: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command of a verl user, without the CPU platform of these tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    env |= {"VERL_FILE_LOGGER_ROOT": str(folder / "logs"), "OMP_NUM_THREADS": "1"}
    env["RAY_prestart_worker_first_driver"] = "0"  # eight places are not eight processes
    args = distillation_args(
        folder / "checkpoints",
        student=tiny / "student",
        teacher=tiny / "teacher",
        train_files=folder / "train.parquet",
    )
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", *args),
        f"hydra.run.dir={folder / 'hydra'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        *more,
    ]
    for _ in range(START_ATTEMPTS):
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        with (folder / "output.txt").open("a") as file:  # for a person, with --basetemp
            file.write(done.stdout + done.stderr)
        if "timed out during startup" not in done.stderr:  # Ray gives its raylet 30 s
            break
    return done


@pytest.mark.slow
def test_main_ppo_trains_saves_and_goes_on(tmp_path, tiny_models):
    verl_rows(tmp_path / "train.parquet", tiny_models, 16)
    logged = tmp_path / "logs" / "demo" / "tiny.jsonl"
    saved = tmp_path / "checkpoints"

    first = main_ppo(tmp_path, tiny_models, HF, "+rock_opd.run.stop_after=2")
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    rows = [json.loads(line) for line in logged.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (saved / "global_step_2/actor/huggingface/model.safetensors").is_file()

    second = main_ppo(tmp_path, tiny_models, HF)
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert "going on from step 2" in second.stdout
    assert "limit: raise data.max_response_length, or see" in second.stdout
    again = [json.loads(line) for line in logged.read_text().splitlines()]
    assert [row["step"] for row in again] == [1, 2, 3, 4] and again[:2] == rows
    names = ("actor/loss", "actor/grad_norm", "actor/lr", "timing_s/step", "train/kl_mean")
    for row in again:
        assert all(name in row["data"] for name in names)
        assert row["data"]["sync/logprob_gap_max"] <= 1e-4  # vLLM held the trainer's weights
    assert again[3]["data"]["train/num_updates"] == 4
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "4"
    summary = json.loads((saved / "rock_opd" / "summary.json").read_text())
    assert summary["finished"] and summary["num_steps"] == 4


@pytest.mark.slow
def test_a_wrong_config_ends_main_ppo_with_our_one_line(tmp_path, tiny_models):
    verl_rows(tmp_path / "train.parquet", tiny_models, 8)
    done = main_ppo(tmp_path, tiny_models, "distillation.distillation_loss.use_task_rewards=true")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rock_opd.errors.")]
    assert said == [
        "rock_opd.errors.ConfigError: verl config: distillation.distillation_loss."
        "use_task_rewards=True is not supported by rock_opd: set it to false; nothing here reads a "
        "reward"
    ]
