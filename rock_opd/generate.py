"""Teacher answers for stage 1: the rollout engine, run with the teacher's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.sampling import sample_requests
from rock_opd.types import Rollout


def generate_answers(
    recipe: Recipe, output: Path, *, address: str | None, say: Callable[[str], None]
) -> int:
    """Answers every prompt of the recipe with its teacher; returns the number of rows written.

    Sampling follows ``rollout`` (temperature, top_p, max_new_tokens, samples_per_prompt,
    num_workers). Rows are written as they come, to a partial file that is renamed when whole.
    """
    import ray

    from rock_opd.actors.starting import start_rollouts
    from rock_opd.data import load_prompts, write_answers
    from rock_opd.driver import connect, skipped_lines
    from rock_opd.models import load_tokenizer, num_real_ids, stop_token_ids

    claim_output(output)
    cfg, teacher = recipe.rollout, recipe.teacher
    tokenizer = load_tokenizer(teacher.model)
    prompts = load_prompts(
        replace(recipe.data, source="student"),
        tokenizer=tokenizer,
        max_prompt_tokens=cfg.max_prompt_tokens,
        max_response_tokens=cfg.max_new_tokens,
        teacher_prefix_tokens=teacher.prefix_tokens,
        seed=recipe.run.seed,
    )
    for line in skipped_lines(prompts):
        say(line)
    requests = sample_requests(
        prompts.prompts, cfg.samples_per_prompt, seed=recipe.run.seed, step=0
    )
    connect(address)
    try:
        rollouts, release = start_rollouts(
            replace(
                recipe,
                rollout=replace(cfg, tensor_parallel=teacher.tensor_parallel, dtype=teacher.dtype),
                placement=replace(recipe.placement, colocate="none"),
            ),
            model=teacher.model,
            num_real_ids=num_real_ids(recipe.student.model, teacher.model),
            stop_token_ids=stop_token_ids(teacher.model),
            say=say,
        )
        size = cfg.max_num_seqs * cfg.num_workers

        def batches() -> Iterator[list[Rollout]]:
            for begin in range(0, len(requests), size):
                lot = requests[begin : begin + size]
                yield rollouts.generate(
                    lot,
                    temperature=cfg.temperature,
                    top_p=cfg.top_p,
                    max_new_tokens=cfg.max_new_tokens,
                )
                say(f"{begin + len(lot)}/{len(requests)} answers")

        num = write_answers(output, batches(), prompts, tokenizer)
        release()
    finally:
        ray.shutdown()
    return num


def claim_output(output: Path) -> None:
    """Sees to it that a long command can write its file in the end.

    Raises:
        ConfigError: it exists, or its folder cannot be made.
    """
    if output.exists():
        raise ConfigError(f"{output} exists; choose another name or remove it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}") from None
