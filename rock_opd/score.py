"""``rock-opd score``: what teacher and student say of every token of many responses, in one file.

The student answers prompts, or the responses of an occurrence file are taken again (the same
trajectories, another student). Lot by lot they are measured and written to a part file of their
own, so that a start that broke off goes on after its last whole lot; at the end the parts become
the occurrence file. This process holds one lot at a time. Nothing is trained.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rock_opd.config import Recipe
from rock_opd.core.metrics import gap_metrics
from rock_opd.data import given_rollouts, load_prompts
from rock_opd.errors import ConfigError, DataError, NumericsError
from rock_opd.generate import claim_output
from rock_opd.inputs import require_models
from rock_opd.measure import Measured, measure
from rock_opd.models import (
    load_tokenizer,
    num_real_ids,
    stop_token_ids,
    tokenizer_fingerprint,
)
from rock_opd.occurrences import (
    FileInfo,
    Occurrences,
    OccurrenceWriter,
    build_registry,
    merge,
    newline_counts,
    read,
    read_info,
)
from rock_opd.runlog import write_atomic
from rock_opd.sampling import sample_requests
from rock_opd.tables import Report, Say, Track
from rock_opd.types import Rollout, SampleRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SHOWN = 20
"""Types in the report's table."""


@dataclass(frozen=True, kw_only=True)
class Lot:
    """What is measured and written at once."""

    requests: list[SampleRequest]
    """Responses the student has yet to sample; empty where they are there already."""
    rollouts: list[Rollout]
    """Responses that are there already."""
    step: np.ndarray | None
    """int32 [N]: the step each position of ``rollouts`` was sampled in; None: 0."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the responses come from."""

    lots: Callable[[], Iterator[Lot]]
    """All of them, always the same."""
    num_lots: int
    samples: bool
    """Whether rollout workers are needed."""
    temperature: float
    top_p: float
    identity: dict[str, Any]
    """What the responses depend on."""


class Engines(Protocol):
    """Starts what measures: ``ray_engines``, or what stands in for it."""

    def __call__(
        self, recipe: Recipe, *, samples: bool, num_real_ids: int, address: str | None, say: Say
    ) -> AbstractContextManager[Any]:
        """Gives ``actors.groups.Roles``."""
        ...


@contextmanager
def ray_engines(
    recipe: Recipe,
    *,
    samples: bool,
    num_real_ids: int,
    address: str | None,
    say: Say,
    num_updates: int = 0,
) -> Iterator[Any]:
    """The roles as Ray actors, rollout workers only if needed.

    Args:
        num_updates: of the student; 0: it has no optimizer.

    Raises:
        ModelError: as ``require_models``; the recipe has its final lengths here.
    """
    import ray

    from rock_opd.actors.starting import start_roles
    from rock_opd.driver import connect

    require_models(recipe)
    connect(address)
    try:
        roles = start_roles(
            recipe,
            num_updates=num_updates,
            num_real_ids=num_real_ids,
            stop_token_ids=stop_token_ids(recipe.student.model) if samples else (),
            say=say,
            samples=samples,
        )
        try:
            yield roles
        finally:
            roles.stop()
    finally:
        ray.shutdown()


def score(
    recipe: Recipe,
    output: Path,
    *,
    reuse: Path | None = None,
    address: str | None = None,
    say: Say,
    track: Track,
    engines: Engines = ray_engines,
) -> Report:
    """Writes the occurrence file ``output``.

    Sampling follows ``rollout``; a lot is ``prompts_per_step`` prompts with their responses (with
    ``data.source=dataset``: the file's own), in the order of the file. Finished lots are kept in
    ``<output>.parts/``; the same command goes on after the last of them.

    Args:
        reuse: an occurrence file, or a run's folder of them: its responses are measured, and each
            keeps its step, version and sampled log-probabilities.
        engines: starts the roles.

    Raises:
        ConfigError: ``output`` exists, or the parts were made with other settings.
        DataError: prompts that cannot be used, responses of another tokenizer, all responses empty.
        ModelError: a model that is not whole or cannot serve its role, as for a run.
        NumericsError: numbers that are not finite, or a sampler that is not the student.
    """
    claim_output(output)
    started = time.monotonic()
    models = (recipe.student.model, recipe.teacher.model)
    require_models(recipe)
    tokenizer, width = load_tokenizer(recipe.student.model), num_real_ids(*models)
    fingerprint = tokenizer_fingerprint(tokenizer)
    if reuse is None:
        source = _from_prompts(recipe, tokenizer, say)
    else:
        recipe, source = _from_file(recipe, reuse, tokenizer=fingerprint, num_types=width)
    info = FileInfo(
        tokenizer=fingerprint,
        num_types=width,
        student=recipe.student.model,
        teacher=recipe.teacher.model,
        estimator=recipe.teacher.payload,
        temperature=source.temperature,
        top_p=source.top_p,
    )
    parts = Parts(output, source.num_lots, _identity(recipe, info, source))
    if done := source.num_lots - len(parts.todo()):
        say(f"{done} of {source.num_lots} lots are there already; going on after them")
    track(done, source.num_lots)
    seconds: dict[str, float] = {}
    num_rows = 0
    if parts.todo():
        newlines = newline_counts(tokenizer, width)
        begun = time.monotonic()
        with engines(
            recipe, samples=source.samples, num_real_ids=width, address=address, say=say
        ) as roles:
            seconds["start"] = time.monotonic() - begun
            num_rows = _measure_lots(
                recipe, source, parts, roles, info, newlines, seconds=seconds, track=track
            )
    with _timed(seconds, "merge"):
        num_samples = merge(parts.files, output)
        parts.remove()
    return _report(
        output,
        tokenizer,
        num_samples=num_samples,
        num_rows=num_rows,
        seconds=seconds,
        total_s=time.monotonic() - started,
    )


def _measure_lots(
    recipe: Recipe,
    source: Source,
    parts: Parts,
    roles: Any,
    info: FileInfo,
    newlines: np.ndarray,
    *,
    seconds: dict[str, float],
    track: Track,
) -> int:
    """Makes the parts that are missing; returns the rows in them."""
    cfg, todo, num_rows = recipe.rollout, set(parts.todo()), 0
    for i, lot in enumerate(source.lots()):
        if i not in todo:
            continue
        rollouts = lot.rollouts
        if lot.requests:
            with _timed(seconds, "generate"):
                roles.turn("rollout")
                rollouts = roles.rollouts.generate(
                    lot.requests,
                    temperature=cfg.temperature,
                    top_p=cfg.top_p,
                    max_new_tokens=cfg.max_new_tokens,
                )
        with _timed(seconds, "measure"):
            measured = measure(roles, recipe, rollouts, entropy=True)
        if lot.requests:
            _check_sampler(measured, recipe.sync.max_logprob_gap)
        num = measured.signals.num_tokens
        with (
            _timed(seconds, "write"),
            OccurrenceWriter(parts.files[i], info, newlines=newlines) as out,
        ):
            out.write(
                Occurrences(
                    rollouts=rollouts,
                    step=np.zeros(num, np.int32) if lot.step is None else lot.step,
                    kl=measured.kl,
                    measure=np.ones(num, np.float32),
                    logratio=measured.logprobs - measured.signals.teacher_logprobs,
                    student_entropy=measured.entropy,
                    teacher_entropy=measured.signals.teacher_entropy,
                )
            )
        num_rows += num
        todo.remove(i)
        track(source.num_lots - len(todo), source.num_lots)
    return num_rows


def _check_sampler(measured: Measured, limit: float) -> None:
    mean = gap_metrics(measured.logprobs, measured.signals)["sync/logprob_gap_mean"]
    if mean is not None and mean > limit:
        raise NumericsError(
            f"sampler and measuring student differ by {mean:.3g} nats per token on average (limit "
            f"sync.max_logprob_gap={limit:g}): the two engines compute another model"
        )


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - begun


# --- where the responses come from ----------------------------------------------------------------


def _from_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Say) -> Source:
    """The recipe's prompts, answered by the student or, with ``data.source=dataset``, by the
    file."""
    from rock_opd.driver import skipped_lines

    cfg, samples = recipe.rollout, recipe.data.source == "student"
    prompts = load_prompts(
        recipe.data,
        tokenizer=tokenizer,
        max_prompt_tokens=cfg.max_prompt_tokens,
        max_response_tokens=cfg.max_new_tokens,
        teacher_prefix_tokens=recipe.teacher.prefix_tokens,
        seed=recipe.run.seed,
    )
    for line in skipped_lines(prompts):
        say(line)
    starts = range(0, len(prompts.prompts), cfg.prompts_per_step)

    def lots() -> Iterator[Lot]:
        for start in starts:
            some = prompts.prompts[start : start + cfg.prompts_per_step]
            asked = sample_requests(some, cfg.samples_per_prompt, seed=recipe.run.seed, step=0)
            yield Lot(
                requests=asked if samples else [],
                rollouts=[] if samples else given_rollouts(some),
                step=None,
            )

    sampling = ("samples_per_prompt", "temperature", "top_p", "max_new_tokens", "dtype")
    return Source(
        lots=lots,
        num_lots=len(starts),
        samples=samples,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        identity={
            "prompts": prompts.fingerprint,
            "data.source": recipe.data.source,
            "rollout.prompts_per_step": cfg.prompts_per_step,
            **(
                {
                    "run.seed": recipe.run.seed,
                    **{f"rollout.{name}": getattr(cfg, name) for name in sampling},
                }
                if samples
                else {}
            ),
        },
    )


def _from_file(
    recipe: Recipe, path: Path, *, tokenizer: str, num_types: int
) -> tuple[Recipe, Source]:
    """The responses of an occurrence file, and the recipe with room for the longest of them. The
    whole file is read once here, so that a damaged one is said before any engine starts."""
    info = read_info(path)
    if (info.tokenizer, info.num_types) != (tokenizer, num_types):
        raise DataError(
            f"{path}: its ids are of tokenizer {info.tokenizer} ({info.num_types} types), the "
            f"student's and teacher's is {tokenizer} ({num_types}): responses can only be scored "
            "by models that share the tokenizer they were sampled with"
        )
    size = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    num_lots = longest = 0
    for lot in _reused_lots(path, size):
        num_lots += 1
        longest = max(
            longest, *(max(len(r.token_ids), len(r.teacher_token_ids)) for r in lot.rollouts)
        )
    rollout, room = recipe.rollout, recipe.teacher.prefix_tokens
    if longest > rollout.max_model_len + room:
        rollout = replace(rollout, max_new_tokens=longest - rollout.max_prompt_tokens - room)
    source = Source(
        lots=lambda: _reused_lots(path, size),
        num_lots=num_lots,
        samples=False,
        temperature=info.temperature,
        top_p=info.top_p,
        identity={
            "reuse": str(path.resolve()),
            "reused files": _stamp(
                sorted(path.glob("step_*.parquet")) if path.is_dir() else [path]
            ),
            "responses of a lot": size,
        },
    )
    return replace(recipe, rollout=rollout), source


def _reused_lots(path: Path, size: int) -> Iterator[Lot]:
    """At most ``size`` responses each, no two of one key."""
    for rows in read(path):
        start, keys = 0, set()
        for i, rollout in enumerate(rows.rollouts):
            if i - start == size or rollout.key in keys:
                part = rows.select(start, i)
                yield Lot(requests=[], rollouts=part.rollouts, step=part.step)
                start, keys = i, set()
            keys.add(rollout.key)
        part = rows.select(start, len(rows.rollouts))
        yield Lot(requests=[], rollouts=part.rollouts, step=part.step)


# --- parts ----------------------------------------------------------------------------------------


class Parts:
    """``<output>.parts/``: a file per finished lot, and what all of them depend on."""

    def __init__(self, output: Path, num_lots: int, identity: dict[str, Any]) -> None:
        """
        Raises:
            ConfigError: the folder holds parts made with other settings, or something else.
        """
        self.folder = output.with_name(output.name + ".parts")
        self.files = [self.folder / f"lot_{i:06d}.parquet" for i in range(num_lots)]
        file = self.folder / "identity.json"
        if not file.exists() and self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"{self.folder} is in the way: it holds no parts; remove it")
        self.folder.mkdir(exist_ok=True)
        if not file.exists():
            write_atomic(file, json.dumps(identity, indent=1))
        before = json.loads(file.read_text(encoding="utf-8"))
        differ = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
        if differ:
            key = differ[0]
            raise ConfigError(
                f"{self.folder} holds parts made with other settings ({', '.join(differ)}; {key} "
                f"was {before.get(key)}, is {identity.get(key)}); go on with those settings, or "
                "remove the folder to start over"
            )

    def todo(self) -> list[int]:
        """Lots without a part."""
        return [i for i, file in enumerate(self.files) if not file.exists()]

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def _identity(recipe: Recipe, info: FileInfo, source: Source) -> dict[str, Any]:
    """What every row depends on: a part made with another value must not be mixed in."""
    teacher = recipe.teacher
    return {
        "tokenizer": info.tokenizer,
        "student.model": info.student,
        "student's weights": weights_stamp(info.student),
        "student.dtype": recipe.student.dtype,
        "teacher.model": info.teacher,
        "teacher's weights": weights_stamp(info.teacher),
        "teacher.dtype": teacher.dtype,
        "teacher.engine": teacher.engine,
        "teacher.payload": teacher.payload,
        "teacher.top_k": teacher.top_k if teacher.payload == "topk_tail" else None,
        **source.identity,
    }


def weights_stamp(model: str) -> str | None:
    """Changes when the files of a local model are written again; None for a hub id."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    return _stamp(sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]))


def _stamp(files: Sequence[Path]) -> str:
    found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


# --- what came out --------------------------------------------------------------------------------


def _report(
    output: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_samples: int,
    num_rows: int,
    seconds: dict[str, float],
    total_s: float,
) -> Report:
    """Facts and the types of highest score, from the finished file.

    Args:
        num_rows: measured by this start, in the phases ``generate``, ``measure`` and ``write``.
    """
    info, registry = read_info(output), build_registry(output)
    stats, table = registry.stats, registry.table(top=NUM_SHOWN)
    working_s = sum(seconds.get(phase, 0.0) for phase in ("generate", "measure", "write"))
    facts = {
        "num_samples": num_samples,
        "num_empty": info.num_empty,
        "num_rows": int(stats.count.sum()),
        "num_types_seen": int((stats.count > 0).sum()),
        "mean_kl": float(stats.loss_sum.sum() / stats.measured.sum()),
        "mean_logratio": float(stats.logratio_sum.sum() / stats.count.sum()),
        "seconds": total_s,
        "phase_s": seconds,
        "rows_per_s": num_rows / working_s if num_rows else None,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    pace = f"{facts['rows_per_s']:,.0f} rows/s, " if num_rows else ""
    columns = ("token_id", "text", "count", "mean_loss", "score", "mean_logratio")
    table = {**table, "text": [tokenizer.decode([int(i)]) for i in table["token_id"]]}
    return Report(
        title=f"Token types by Rock Score, highest {len(table['text'])}",
        facts=facts,
        lines=[
            f"{num_samples} responses ({info.num_empty} empty ones left out), {facts['num_rows']} "
            f"positions, {facts['num_types_seen']} token types",
            f"reverse KL {facts['mean_kl']:.4f} nats per position ({info.estimator}), log-ratio "
            f"{facts['mean_logratio']:.4f}",
            f"{total_s:.0f} s, {pace}this process held at most "
            f"{facts['peak_rss_bytes'] / 2**20:.0f} MiB",
        ],
        table={("mean_kl" if name == "mean_loss" else name): table[name] for name in columns},
        files=[output],
    )


def peak_rss_bytes() -> int:
    """Most memory this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
