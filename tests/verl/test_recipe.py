"""verl's config as a recipe of ours, from verl's own yaml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl_configs import compose, distillation_args

from rock_opd.config import Recipe
from rock_opd.core.alarms import FIXED
from rock_opd.core.schedule import learning_rate
from rock_opd.errors import ConfigError
from rock_opd.integrations.verl.keys import KEYS, key_table
from rock_opd.integrations.verl.names import VerlNames
from rock_opd.integrations.verl.recipe import recipe_from_verl, with_warmup
from rock_opd.integrations.verl.unread import unread_keys, verl_defaults
from rock_opd.integrations.verl.unsupported import ONLY, refusal_table, under

ROOT = Path(__file__).parents[2]
ARGS = distillation_args(Path("checkpoints/demo/tiny"))


OPTIM = "actor_rollout_ref.actor.optim"
COSINE = (f"{OPTIM}.lr_scheduler_type=cosine", f"{OPTIM}.min_lr_ratio=0.1")
HF = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


def recipe(*more: str) -> Recipe:
    return recipe_from_verl(compose([*ARGS, *more]))


def refusal(*more: str) -> str:
    with pytest.raises(ConfigError) as error:
        recipe(*more)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_keys_of_a_verl_command_reach_the_recipe():
    found = recipe(
        "data.seed=7",
        "trainer.n_gpus_per_node=2",
        "trainer.max_actor_ckpt_to_keep=3",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.deepspeed.zero_stage=3",
        "distillation.n_gpus_per_node=2",
        "trainer.total_training_steps=20",
    )
    assert (found.run.seed, found.run.num_steps, found.run.device) == (7, 20, "cpu")
    assert str(found.run_dir) == "checkpoints/demo/tiny/rock_opd"
    assert (found.student.model, found.student.num_ranks, found.student.zero_stage) == (
        *("student", 2, 3),
    )
    assert (found.rollout.num_workers, found.rollout.samples_per_prompt) == (2, 2)
    assert (found.rollout.prompts_per_step, found.rollout.max_model_len) == (4, 64 + 24)
    assert (found.teacher.model, found.teacher.num_replicas) == ("teacher", 2)
    assert found.student.micro_batch_tokens == 4 * (64 + 24)
    assert (found.checkpoint.every, found.checkpoint.keep_last) == (1, 3)
    assert found.eval.problems is None  # test_freq=-1


def test_the_constant_rate_of_verl_is_a_cosine_that_does_not_fall():
    assert recipe().optim.min_lr == recipe().optim.lr == 1e-3
    assert recipe(*COSINE).optim.min_lr == pytest.approx(1e-4)


@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_the_shape_of_the_schedule_is_kept_under_another_rate_of_the_block(lr):
    override = f"+rock_opd.optim.lr={lr}"
    assert recipe(override).optim.min_lr == recipe(override).optim.lr == lr
    assert recipe(override, *COSINE).optim.min_lr == pytest.approx(lr / 10)
    assert recipe("+rock_opd.optim.min_lr=1e-5", *COSINE).optim.min_lr == 1e-5


def test_what_follows_from_other_keys_follows_from_the_block_where_that_sets_them():
    longer = recipe("+rock_opd.rollout.max_new_tokens=100")
    assert longer.student.micro_batch_tokens == 4 * (64 + 100)
    seldom = recipe("+rock_opd.checkpoint.every=5", "+rock_opd.checkpoint.keep_last=2", HF)
    assert (seldom.checkpoint.save_hf_every, seldom.checkpoint.keep_hf) == (5, 2)
    graded = recipe("+rock_opd.eval.every=5", "data.val_files=val.parquet")
    assert graded.eval.problems == "val.parquet"
    ordered = recipe("+rock_opd.data.shuffle=false", "data.train_max_samples=3")
    assert ordered.data.limit == 3
    on_gpus = [a for a in ARGS if not a.startswith("+rock_opd.run.device")]
    wide = ["trainer.n_gpus_per_node=4", "distillation.n_gpus_per_node=4"]
    wide += ["+rock_opd.rollout.tensor_parallel=2", "+rock_opd.teacher.tensor_parallel=4"]
    found = recipe_from_verl(compose([*on_gpus, *wide]))
    assert (found.rollout.num_workers, found.teacher.num_replicas) == (2, 1)


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize(("num_steps", "ratio"), [(10, 0.15), (100, 0.029), (7, 0.5), (29, 0.3)])
def test_the_warm_up_is_as_long_as_verls_and_the_rates_behind_it_are_the_same(
    kind, num_steps, ratio
):
    import torch
    from verl.utils import torch_functional as verl

    config = compose(
        [*ARGS, f"{OPTIM}.lr_scheduler_type={kind}", f"{OPTIM}.lr_warmup_steps_ratio={ratio}"]
    )
    optim = with_warmup(recipe_from_verl(config), config, num_steps=num_steps).optim
    plain = torch.optim.SGD([torch.zeros(1)], lr=optim.lr)
    warmup = int(ratio * num_steps)
    schedule = (
        verl.get_constant_schedule_with_warmup(plain, warmup)
        if kind == "constant"
        else verl.get_cosine_schedule_with_warmup(plain, warmup, num_steps)
    )
    for update in range(num_steps):
        ours = learning_rate(
            update,
            num_updates=num_steps,
            lr=optim.lr,
            min_lr=optim.min_lr,
            warmup_ratio=optim.warmup_ratio,
        )
        if update < warmup:
            assert ours == pytest.approx(optim.lr * (update + 1) / (warmup + 1))
        else:
            assert ours == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        plain.step()
        schedule.step()


def test_the_warm_up_in_steps_is_of_the_steps_that_the_run_has():
    config = compose([*ARGS, f"{OPTIM}.lr_warmup_steps=2"])  # by epochs: nobody said how many
    for num_steps in (4, 20):
        found = with_warmup(recipe_from_verl(config), config, num_steps=num_steps)
        assert found.optim.warmup_ratio * num_steps == 2
    with pytest.raises(ConfigError, match=r"lr_warmup_steps=2 .*the run has 1 steps"):
        with_warmup(recipe_from_verl(config), config, num_steps=1)
    config = compose([*ARGS, f"{OPTIM}.lr_warmup_steps=2", "+rock_opd.optim.warmup_ratio=0.25"])
    found = with_warmup(recipe_from_verl(config), config, num_steps=20)
    assert found.optim.warmup_ratio == 0.25


@pytest.mark.parametrize(
    ("mode", "policy_gradient", "divergence", "payload"),
    [
        ("k2", "false", "policy_gradient", "sampled"),
        ("rock_k2", "false", "policy_gradient", "sampled"),
        ("k1", "true", "policy_gradient", "sampled"),
        ("rock_k1", "true", "policy_gradient", "sampled"),
        ("rock_reverse_kl_topk", "false", "reverse_kl", "topk_tail"),
    ],
)
def test_a_loss_becomes_the_one_with_the_same_gradient(mode, policy_gradient, divergence, payload):
    found = recipe(
        f"distillation.distillation_loss.loss_mode={mode}",
        f"distillation.distillation_loss.use_policy_gradient={policy_gradient}",
        "distillation.distillation_loss.topk=16",
    )
    assert (found.loss.divergence, found.teacher.payload) == (divergence, payload)
    assert found.teacher.top_k == 16


def test_k1_as_a_reward_and_k2_backpropagated_have_the_gradient_of_our_policy_gradient():
    """What the table of losses rests on: (log q - log p) grad log q, token by token."""
    import torch
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, kl_penalty
    from verl.workers.config import ActorConfig

    from rock_opd.core.objective import policy_gradient_loss

    log_q = torch.tensor([-1.0, -2.0, -0.5, -3.0])
    log_p = torch.tensor([-2.0, -1.5, -0.5, -1.0])

    def gradient(loss) -> torch.Tensor:
        leaf = log_q.clone().requires_grad_()
        loss(leaf).backward()
        return leaf.grad

    ours = gradient(lambda leaf: policy_gradient_loss(leaf, log_p).mean())
    k2 = gradient(lambda leaf: kl_penalty(leaf, log_p, "k2").mean())
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=4, global_batch_size=1)
    k1 = gradient(
        lambda leaf: compute_policy_loss_vanilla(
            old_log_prob=log_q[None],
            log_prob=leaf[None],
            advantages=-kl_penalty(leaf[None], log_p[None], "k1").detach(),
            response_mask=torch.ones(1, 4),
            loss_agg_mode="token-mean",
            config=actor,
        )[0]
    )
    assert ours.tolist() == ((log_q - log_p) / 4).tolist()
    assert torch.allclose(k2, ours, atol=1e-7) and torch.allclose(k1, ours, atol=1e-7)


@pytest.mark.parametrize(
    "mode", ["k1", "k3", "rock_k3", "abs", "forward_kl_topk", "rock_reverse_kl_topk_renorm"]
)
def test_a_loss_without_an_equal_is_refused_and_what_to_take_instead_is_said(mode):
    text = refusal(f"distillation.distillation_loss.loss_mode={mode}")
    assert f"distillation_loss.loss_mode={mode} is not supported by rock_opd: " in text


@pytest.mark.parametrize("where", ["actor_rollout_ref.", "+rock_opd."])
def test_the_reverse_kl_of_logits_that_verl_divides_by_a_temperature_is_refused(where):
    override = f"{where}rollout.temperature=0.7"
    mode = "distillation.distillation_loss.loss_mode=rock_reverse_kl_topk"
    assert f"{override} is not supported by rock_opd: with loss_mode=rock" in refusal(
        mode, override
    )
    ours = ("+rock_opd.loss.divergence=reverse_kl", "+rock_opd.teacher.payload=topk_tail")
    assert recipe(mode, override, *ours).rollout.temperature == 0.7


def test_the_block_of_overrides_goes_before_verls_keys():
    found = recipe(
        "distillation.distillation_loss.loss_mode=k3",  # has no equal, and is not asked
        "+rock_opd.loss.divergence=forward_kl",
        "+rock_opd.teacher.payload=hidden",
        "+rock_opd.policy.name=rock_freeze",
        "+rock_opd.policy.top_k=3",
    )
    assert (found.loss.divergence, found.teacher.payload) == ("forward_kl", "hidden")
    assert (found.policy.name, found.policy.top_k) == ("rock_freeze", 3)


def test_a_wrong_key_of_the_block_names_the_nearest():
    assert "did you mean '+rock_opd.policy.top_k'" in refusal("+rock_opd.policy.topk=3")
    assert "trainer.default_local_dir" in refusal("+rock_opd.run.name=mine")


TEACHER = "distillation.teacher_models.teacher_model"
ROLLOUT, CHECKPOINT = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.checkpoint"
REFUSED = {
    "distillation.enabled=false": "distillation.enabled=False",
    "distillation.distillation_loss.use_task_rewards=true": "use_task_rewards=True",
    "distillation.distillation_loss.loss_max_clamp=5": "loss_max_clamp=5",
    "algorithm.adv_estimator=gae": "algorithm.adv_estimator=gae",
    "critic.enable=true": "critic.enable=True",
    "actor_rollout_ref.actor.strategy=megatron": "actor.strategy=megatron",
    "actor_rollout_ref.model.lora_rank=8": "model.lora_rank=8",
    "actor_rollout_ref.actor.ppo_epochs=2": "actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2": "actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2": "ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": "loss_agg_mode=seq-mean",
    "actor_rollout_ref.actor.use_kl_loss=true": "actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.multi_turn.enable=true": "multi_turn.enable=True",
    "actor_rollout_ref.rollout.name=sglang": "rollout.name=sglang",
    "actor_rollout_ref.rollout.top_k=20": "rollout.top_k=20",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": "set it to 1 on CPU",
    "+distillation.teacher_models={a:{model_path:x},b:{model_path:y}}": "one teacher",
    "data.custom_cls.path=mine.py": "data.custom_cls.path=mine.py",
    "reward.custom_reward_function.path=mine.py": "custom_reward_function.path=mine.py",
    f"+{ROLLOUT}.engine_kwargs.vllm.max_logprobs=3": "rollout.engine_kwargs.vllm.max_logprobs=3",
    f"{CHECKPOINT}.save_contents=[model]": "checkpoint.save_contents=['model']",
    f"{CHECKPOINT}.save_contents=[model,optimizer,extra,foo]": "checkpoint.save_contents=",
    f"{CHECKPOINT}.load_contents=[model]": "checkpoint.load_contents=['model']",
    f"{TEACHER}.inference.name=sglang": f"{TEACHER}.inference.name=sglang",
    f"{TEACHER}.inference.data_parallel_size=2": f"{TEACHER}.inference.data_parallel_size=2",
    f"{TEACHER}.inference.load_format=dummy": f"{TEACHER}.inference.load_format=dummy",
    f"+{TEACHER}.inference.engine_kwargs.vllm.max_logprobs=3": "vllm.max_logprobs=3",
    "data.train_files=[a.parquet,b.parquet]": "one parquet or JSONL file",
    "trainer.default_hdfs_dir=hdfs://x": "+rock_opd.run.mirror",
    "+data.apply_chat_template_kwargs.tools=x": "apply_chat_template_kwargs.tools=x",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear": "lr_scheduler_type=linear",
    "actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes.optim": "optimizer_impl=bitsand",
    "+distillation.teacher_models.math.model_path=x": "math.inference.tensor_model_parallel_size",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(override):
    more = [override]
    if override.startswith("+distillation.teacher_models={"):
        more = [f"+distillation.teacher_models.{n}.model_path={n}" for n in ("a", "b")]
    text = refusal(*more)
    assert text.startswith("verl config: ") and REFUSED[override] in text


TOPK = "distillation.distillation_loss.loss_mode=rock_reverse_kl_topk"
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=true"
WRONG = [
    (f"{OPTIM}.lr", "abc"),
    (f"{OPTIM}.lr", "null"),
    (f"{OPTIM}.betas", "0.9"),
    (f"{OPTIM}.betas", "null"),
    (f"{OPTIM}.lr_warmup_steps", "abc"),
    (f"{OPTIM}.lr_warmup_steps_ratio", "abc"),
    (f"{OPTIM}.min_lr_ratio", "abc", *COSINE[:1]),
    (f"{OPTIM}.override_optimizer_config", "abc"),
    ("trainer.nnodes", "null"),
    ("trainer.n_gpus_per_node", "abc"),
    ("trainer.n_gpus_per_node", "0"),
    ("trainer.save_freq", "abc"),
    ("trainer.save_freq", "2.5"),
    ("trainer.total_training_steps", "2.7"),
    ("trainer.total_epochs", "2.5"),
    ("trainer.max_actor_ckpt_to_keep", "true"),
    ("trainer.default_local_dir", "null"),
    ("data.train_files", "null"),
    ("data.max_prompt_length", "null"),
    ("data.max_response_length", "abc"),
    ("distillation.distillation_loss.topk", "abc", TOPK),
    ("distillation.distillation_loss.topk", "0", TOPK),
    ("distillation.distillation_loss.topk", "null", TOPK),
    ("distillation.n_gpus_per_node", "abc"),
    ("distillation.teacher_models", "abc"),
    (f"{TEACHER}.inference.max_num_seqs", "abc"),
    (f"{TEACHER}.model_path", "5"),
    ("actor_rollout_ref.model.path", "5"),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "abc"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "null", DYNAMIC),
    ("actor_rollout_ref.actor.checkpoint.load_contents", "5"),
    ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", "null"),
    (
        "actor_rollout_ref.rollout.val_kwargs.temperature",
        "null",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    ),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: "=".join(wrong[:2]))
def test_a_value_of_a_wrong_type_is_one_line_with_verls_key_and_the_value(wrong):
    key, value, *more = wrong
    text = refusal(*more, f"{key}={value}")
    said = {"null": "None|not Optional", "true": "True"}.get(value, value)
    assert re.match(rf"verl config: {re.escape(key)}[=: ]", text), text
    assert re.search(said, text) or "a list is expected" in text, text


def test_a_table_that_no_loss_reads_may_have_no_size():
    assert (
        recipe("distillation.distillation_loss.topk=null").teacher.top_k == Recipe().teacher.top_k
    )


SAID = {
    FIXED["rollout/truncated_share"][1]: "raise data.max_response_length, or see",
    "row 3 is too long (data.on_bad_row=skip leaves such rows out)": "(data.filter_overlong_prompts"
    "=true leaves such rows out)",
    "(rollout.max_prompt_tokens + the longest answer)": "(data.max_prompt_length + the longest",
    "start over under another run.name": "start over under another trainer.default_local_dir",
    "teacher.max_num_seqs is too high": f"{TEACHER}.inference.max_num_seqs is too high",
    "set optim.max_bad_steps": "set +rock_opd.optim.max_bad_steps",
    "student.micro_batch_tokens=3": "(in verl: student.micro_batch_tokens is actor_rollout_ref."
    "actor.ppo_max_token_len_per_gpu, with",
    "set student.dtype.": "set actor_rollout_ref.actor.deepspeed.dtype.",
    "policy.top_k is low": "+rock_opd.policy.top_k is low",
}


@pytest.mark.parametrize("ours", SAID)
def test_a_message_names_what_a_verl_user_sets(ours):
    names = VerlNames(compose(ARGS))
    assert SAID[ours] in names(ours)
    assert SAID[ours] in names(names(ours)) and "<teacher>" not in names(ours)


def test_a_message_about_a_key_that_the_block_sets_names_the_block():
    names = VerlNames(compose([*ARGS, "+rock_opd.rollout.max_new_tokens=9"]))
    assert names("raise rollout.max_new_tokens") == "raise +rock_opd.rollout.max_new_tokens"


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref.rollout.temperature=0.7",
        "+rock_opd.policy.top_k",
        "/runs/run.name/log.txt",
        "self.run.dir",
        "step 3: train/kl_mean is 0.1",
        "optim.learning",
    ],
)
def test_what_is_no_key_of_a_recipe_stays_as_it_is(text):
    assert VerlNames(compose(ARGS))(text) == text


def test_on_gpus_all_roles_take_turns_on_the_trainers():
    on_gpus = [a for a in ARGS if not a.startswith("+rock_opd.run.device")]
    more = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    found = recipe_from_verl(compose([*on_gpus, *more]))
    assert (found.run.device, found.placement.colocate) == ("cuda", "all")
    assert (found.student.num_ranks, found.rollout.num_workers) == (4, 2)
    with pytest.raises(ConfigError, match=r"trainer\.device=npu is not supported"):
        recipe_from_verl(compose([*on_gpus, "trainer.device=npu"]))


def test_a_value_out_of_range_names_verls_key_too():
    text = refusal("actor_rollout_ref.actor.optim.lr=2")
    assert "optim.lr must lie in" in text and "actor_rollout_ref.actor.optim.lr" in text


def test_every_key_of_the_tables_exists_in_verls_own_config():
    """A key that verl renamed would be passed over in silence."""
    base = [a for a in ARGS if "deepspeed" not in a and "rock_opd.integrations" not in a]
    configs = [compose(ARGS), compose(base)]
    absent = "trainer.remove", object()
    names = [under(TEACHER, row.verl) for row in (*KEYS, *ONLY)]
    may_be_absent = {
        "actor_rollout_ref.actor.optim.grad_clip",  # verl's old name, still read
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class",  # not in verl's yaml
        "data.function_tool_path",
        f"{TEACHER}.inference.quantization",
    }
    missing = [
        name
        for name in names
        if all(OmegaConf.select(c, name, default=absent) is absent for c in configs)
    ]
    assert set(missing) <= may_be_absent


def test_the_docs_hold_the_tables_as_they_are():
    text = (ROOT / "docs" / "verl.md").read_text(encoding="utf-8")
    assert key_table() in text and refusal_table() in text


def test_a_key_that_nothing_reads_is_told_and_none_that_follows_another():
    config = compose([*ARGS, "actor_rollout_ref.actor.clip_ratio=0.3", "data.max_prompt_length=99"])
    OmegaConf.resolve(config)  # as verl's task runner does
    defaults = verl_defaults(config.model_engine)
    assert unread_keys(config, defaults) == ["actor_rollout_ref.actor.clip_ratio"]


UNREAD = {
    f"{TEACHER}.inference.max_model_len": "10",
    f"{TEACHER}.inference.temperature": "0.5",  # verl's own follows the rollout's
    f"{TEACHER}.inference.enforce_eager": "false",
    f"{TEACHER}.num_replicas": "2",
    f"{TEACHER}.key": "foo",
    f"{CHECKPOINT}.foo": "1",
    f"{ROLLOUT}.engine_kwargs.sglang.foo": "1",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": "true",  # follows the actor's
}


@pytest.mark.parametrize("resolved", [False, True])
@pytest.mark.parametrize("key", UNREAD)
def test_every_key_that_is_set_and_not_read_is_told_wherever_it_stands(key, resolved):
    config = compose([*ARGS, f"++{key}={UNREAD[key]}"])
    if resolved:
        OmegaConf.resolve(config)
    recipe_from_verl(config)
    assert unread_keys(config, verl_defaults(config.model_engine)) == [key]


def test_what_is_set_to_verls_own_value_is_not_told():
    config = compose([*ARGS, f"{TEACHER}.inference.temperature=1.0", f"{TEACHER}.num_replicas=0"])
    assert unread_keys(config, verl_defaults(config.model_engine)) == []


def test_verls_own_columns_are_the_ones_read():
    plain, other = recipe(), recipe("data.prompt_key=question")
    assert (plain.data.row_format, plain.data.prompt_column) == ("verl", "prompt")
    assert other.data.prompt_column == "question"
