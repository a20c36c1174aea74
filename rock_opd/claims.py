"""Parts of a long piece of work, done in order in one folder, each once: what a part was made from
is its claim, and a part whose claim still holds is not done again.

A claim names the keys of the recipe that the part depends on, and the files of earlier parts that
it reads, by their content. ``claims.json`` holds all of them; ``<part>.report.json`` is there when
the part is whole.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rock_opd.config import Recipe
from rock_opd.durable import file_facts
from rock_opd.errors import ConfigError, DataError
from rock_opd.runlog import to_json, write_atomic
from rock_opd.tables import Report, Say, Track

Claim = dict[str, Any]
"""Key of the recipe, or file -> its value, or what tells its content; JSON-able."""
PACE = {
    "student": {
        *("from_run", "trust_remote_code", "num_ranks", "zero_stage", "micro_batch_tokens"),
        *("gradient_checkpointing", "logit_chunk_rows", "offload_optimizer"),
    },
    "rollout": {
        *("num_workers", "tensor_parallel", "max_num_seqs", "kv_cache_bytes"),
        "gpu_memory_utilization",
    },
    "teacher": {
        *("trust_remote_code", "num_replicas", "tensor_parallel", "urls", "api_key_env"),
        *("request_timeout_s", "retry_for_s", "max_concurrency", "max_num_seqs"),
        *("max_batched_tokens", "park_bytes", "logit_chunk_rows", "kv_cache_bytes"),
        "gpu_memory_utilization",
    },
}
"""Keys that say how fast and where, and change no outcome; any other key of its section does."""
TRAINING = {
    "policy": {
        *("name", "ids_file", "lam", "hysteresis", "warmup_steps", "refresh_every"),
        *("audit_share", "window_radius", "window_threshold"),
    },
    "probe": {"num_rollouts"},
    "eval": {"heldout_prompts", "num_heldout", "every"},
}
"""Keys that a run reads and no offline command."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of the work."""

    name: str
    about: str
    run: Callable[[], Report]
    depends: Claim
    """What its outcome hangs on, but for ``reads``."""
    reads: tuple[Path, ...] = ()
    """Files of earlier parts that its outcome hangs on."""
    replaces: tuple[Path, ...] = ()
    """What must be gone before it is done again."""
    pieces: tuple[Path, ...] = ()
    """What it goes on after, when it broke off and the claim still holds ..."""
    pieces_serve_others: bool = False
    """... or at least ``depends``, whatever it reads now."""

    def claim(self) -> Claim:
        """What it is made from, as things are now."""
        return to_json({**self.depends, **{path.name: content(path) for path in self.reads}})


@dataclass
class Claims:
    """``claims.json``: which models the work is about, and what each part was made from."""

    folder: Path
    models: dict[str, str]
    parts: dict[str, Claim]

    @classmethod
    def open(cls, folder: Path, models: dict[str, str]) -> Claims:
        """Reads it, or makes the folder.

        Raises:
            ConfigError: the folder holds the study of other models, or something else.
            DataError: a damaged file.
        """
        file = folder / "claims.json"
        if not file.is_file():
            if folder.exists() and any(folder.iterdir()):
                raise ConfigError(
                    f"{folder} exists and holds no study ({file.name}); choose another folder"
                )
            folder.mkdir(parents=True, exist_ok=True)
            claims = cls(folder=folder, models=models, parts={})
            claims.write()
            return claims
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
            before, parts = dict(held["models"]), dict(held["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file}: damaged ({error!r}); remove {folder} to start over") from None
        for name, model in models.items():
            if before.get(name) != model:
                raise ConfigError(
                    f"{folder} holds the study of another run ({name} was {before.get(name)}, is "
                    f"{model}); choose another folder or remove it"
                )
        return cls(folder=folder, models=models, parts=parts)

    def write(self) -> None:
        held = {"models": self.models, "parts": self.parts}
        write_atomic(self.folder / "claims.json", json.dumps(held, indent=1) + "\n")

    def report(self, part: Part) -> Path:
        """There when the part is whole."""
        return self.folder / f"{part.name}.report.json"


def run_parts(
    parts: Sequence[Part], claims: Claims, *, say: Say, track: Track
) -> dict[str, dict[str, Any]]:
    """Does, in their order, the parts that are missing or whose claim no longer holds.

    Returns:
        Every part's report.
    """
    facts = {}
    for i, part in enumerate(parts):
        track(i, len(parts))
        report, claim = claims.report(part), part.claim()
        before = claims.parts.get(part.name)
        why = [] if before is None else _differences(before, claim)
        if report.is_file() and not why:
            say(f"{part.name}: already done")
        else:
            again = f" (again: {', '.join(why[:3])})" if why else ""
            say(f"{part.name}: {part.about}{again}")
            _make_room(part, report, before, claim)
            claims.parts[part.name] = claim
            claims.write()
            write_atomic(report, part.run().to_json())
        facts[part.name] = json.loads(report.read_text(encoding="utf-8"))
    track(len(parts), len(parts))
    return facts


def _make_room(part: Part, report: Path, before: Claim | None, claim: Claim) -> None:
    """Takes away what the part would stumble over: its outcome, and pieces of another claim."""
    report.unlink(missing_ok=True)
    matter = part.depends if part.pieces_serve_others else claim
    fit = before is not None and all(before.get(key) == claim[key] for key in matter)
    for path in (*part.replaces, *(() if fit else part.pieces)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _differences(before: Claim, now: Claim) -> list[str]:
    found = []
    for key in {**before, **now}:
        was, given = before.get(key), now.get(key)
        if was != given:
            told = not any(re.fullmatch(r"[0-9a-f]{16,}", str(value)) for value in (was, given))
            found.append(f"{key} was {was}, is {given}" if told else f"{key} is another")
    return found


def content(path: Path) -> str:
    """Tells what a file holds, or that it is not there."""
    return file_facts(path).digest if path.is_file() else "none"


def recipe_keys(recipe: Recipe, section: str, *leave_out: dict[str, set[str]]) -> Claim:
    """The keys of a section that an outcome hangs on; of a file that one names, the content too."""
    names = set().union(*(names.get(section, set()) for names in leave_out))
    keys = {
        f"{section}.{key}": value
        for key, value in asdict(getattr(recipe, section)).items()
        if key not in names
    }
    files = ("data.prompts", "eval.problems", "policy.guard_file")
    return keys | {f"the file of {key}": content(Path(keys[key])) for key in files if keys.get(key)}
