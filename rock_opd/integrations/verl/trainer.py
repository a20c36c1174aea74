"""verl's trainer ``rock_opd``: our loop behind verl's command, config, loggers and checkpoints.

``main_ppo`` builds it in the process of its task runner, where it stands in the driver's place: it
starts our coordinator as an actor of the cluster that verl has joined, watches it, and passes on
what it finds in the run's folder: metrics to verl's ``Tracking``, checkpoints to ``global_step_N``.

It refuses what ``recipe_from_verl`` refuses, and makes no use of verl's workers, servers and
queue. ``default_local_dir`` must lie where every node of the cluster sees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.tracking import Tracking

from rock_opd.checkpoint import newest_whole
from rock_opd.config import resolve_dtype
from rock_opd.data import num_steps
from rock_opd.driver import CoordinatorActor, anchor_paths, settle_run_dir
from rock_opd.errors import PlacementError
from rock_opd.inputs import load_inputs
from rock_opd.integrations.verl import plugin
from rock_opd.integrations.verl.checkpoints import StepFolders, settle_resume
from rock_opd.integrations.verl.names import VerlNames
from rock_opd.integrations.verl.recipe import epochs_cover, recipe_from_verl, with_warmup
from rock_opd.integrations.verl.rows import RowFollower
from rock_opd.integrations.verl.unread import unread_keys, verl_defaults
from rock_opd.integrations.verl.unsupported import TRAINER
from rock_opd.progress import Progress
from rock_opd.supervisor import Wish, supervise


class NoAgentLoop:
    """Stands where verl's task runner wants an agent loop manager: rollouts are ours."""

    @classmethod
    def create(cls, **clients: Any) -> NoAgentLoop:
        return cls()


class RockOPDTrainer(PPOTrainer):
    """A ``PPOTrainer`` by type alone, since verl's registry asks for one: its constructor and its
    steps build workers and servers that our own roles stand for."""

    def __init__(self, config: DictConfig) -> None:
        """
        Raises:
            ConfigError: a setting that cannot be honoured.
        """
        self.config = config
        self._names = VerlNames(config)
        recipe = recipe_from_verl(config)
        if unread := unread_keys(config, verl_defaults(config.model_engine)):
            print(f"set, and not read by {TRAINER}: {', '.join(unread)}", flush=True)
        with open_dict(config):  # read by the task runner once the trainer is up
            config.actor_rollout_ref.rollout.agent.agent_loop_manager_class = (
                f"{NoAgentLoop.__module__}.{NoAgentLoop.__qualname__}"
            )
        self.checkpoint_callback = build_checkpoint_callback(config)
        self.recipe = anchor_paths(recipe, Path.cwd())

    def init(self) -> None:
        """Reads the data and claims the run's folder; no engine starts yet.

        Raises:
            RockOPDError: one line.
        """
        if self.recipe.run.device == "cuda" and not ray.cluster_resources().get("GPU"):
            raise PlacementError(
                "trainer.device=cuda, and no node of the cluster offers a GPU to Ray; to train on "
                "CPUs: +rock_opd.run.device=cpu"
            )
        with self._names.spoken():
            self._inputs = load_inputs(self.recipe)
            prompts = self._inputs.prompts
            self._steps_per_epoch = prompts.steps_per_epoch(self.recipe.rollout.prompts_per_step)
            epochs_cover(self.recipe, self._steps_per_epoch)
            dtype = resolve_dtype(self.recipe.student.dtype, self.recipe.run.device)
            self._num_steps = num_steps(self.recipe, prompts, dtype=dtype)
            recipe = settle_resume(
                with_warmup(self.recipe, self.config, num_steps=self._num_steps),
                mode=self.config.trainer.resume_mode,
                path=self.config.trainer.resume_from_path,
            )
            self.recipe = settle_run_dir(recipe, say=self._say)

    def get_llm_client(self) -> None:
        """None: our coordinator asks its own workers."""

    def get_teacher_client(self) -> None:
        """None, as ``get_llm_client``."""

    def get_reward_handles(self) -> None:
        """None: nothing here reads a reward."""

    def fit(self, agent_loop_manager: NoAgentLoop) -> None:
        """The whole run, or what is left of it.

        Raises:
            RockOPDError: as the run raised it; its last checkpoint stands.
            KeyboardInterrupt: it was abandoned.
        """
        self.logger = Tracking(
            project_name=self.config.trainer.project_name,
            experiment_name=self.config.trainer.experiment_name,
            default_backend=self.config.trainer.logger,
            config=OmegaConf.to_container(self.config, resolve=True),
        )
        recipe = self.recipe
        done = (newest_whole(recipe.run_dir) or 0) if recipe.resume else 0
        rows = RowFollower(
            recipe,
            self.logger,
            steps_per_epoch=self._steps_per_epoch,
            num_steps=self._num_steps,
            done=done,
        )
        folders = StepFolders(recipe)
        if recipe.resume:
            self._say(f"going on from step {done}")

        def show(progress: Progress) -> None:
            for line in progress.lines:
                self._say(str(line))
            rows.follow()
            self._publish(folders)

        try:
            with self._names.spoken(), Wish(recipe.run.grace_s) as wish:
                summary = supervise(CoordinatorActor, recipe, self._inputs, wish=wish, show=show)
        finally:
            rows.finish()
            self._publish(folders, final=True)
        if not summary["finished"]:
            self._say(
                f"stopped after step {summary['num_steps']}; the same command goes on from there"
            )

    def _say(self, text: str) -> None:
        print(self._names(text), flush=True)

    def _publish(self, folders: StepFolders, *, final: bool = False) -> None:
        for step, folder in folders.publish(final=final):
            self.checkpoint_callback.on_save(
                trainer=self, global_step=step, checkpoint_dir=str(folder), async_save=False
            )

    def on_step_end(self) -> None:
        """Abstract in verl; our loop has no such hook."""

    def on_sample_end(self) -> None:
        """As ``on_step_end``."""


def register() -> None:
    """Puts the trainer into verl's registry."""
    register_trainer(TRAINER)(RockOPDTrainer)


plugin.complete(__name__)
