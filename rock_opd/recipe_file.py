"""Recipes as files and overrides: read, merged, checked, written back."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.redact import redact


def _hint(dotted: str) -> str:
    """What an unknown key may have meant: the nearest known one, or what its section has."""
    sections = {
        section.name: [f.name for f in fields(section.default_factory)]
        for section in fields(Recipe)
        if is_dataclass(section.default_factory)
    }
    every = [f"{section}.{key}" for section, keys in sections.items() for key in keys]
    section, _, rest = dotted.partition(".")
    near = [key for key in every if key.endswith(f".{dotted.rpartition('.')[2]}")]
    if rest and section in sections:
        close = difflib.get_close_matches(rest, sections[section], n=1, cutoff=0.7)
        near = [f"{section}.{key}" for key in close] or near
        if not near:
            return f"{section} has: {', '.join(sections[section])}"
    near = near or difflib.get_close_matches(dotted, [*sections, *every, "resume"], n=1)
    if near:
        return f"did you mean {' or '.join(repr(key) for key in near[:3])}?"
    return f"a recipe has: {', '.join([*sections, 'resume'])}"


def _unlock(node: DictConfig) -> None:
    """Frozen dataclasses become read-only nodes; a recipe must be merged into them before they are
    built."""
    OmegaConf.set_readonly(node, None)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _unlock(child)


def _dotlist(overrides: list[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item or item.startswith("="):
            raise ConfigError(f"override '{item}' must look like key.sub=value")
        try:
            OmegaConf.from_dotlist([item])
        except Exception as error:  # yaml's and OmegaConf's own kinds
            raise ConfigError(f"override '{item}': {_first_problem(error)}") from None
    return OmegaConf.from_dotlist(overrides)


def _first_problem(error: Exception) -> str:
    """One line of a YAML error: what, and where in the file."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}: {problem}"


def _refuse_resolvers(node: Any, where: str) -> None:
    """Lets a value refer to another key (``${run.name}``) and to nothing else: ``${oc.env:TOKEN}``
    would copy a secret into the run's folder."""
    if isinstance(node, dict):
        for value in node.values():
            _refuse_resolvers(value, where)
    elif isinstance(node, list):
        for value in node:
            _refuse_resolvers(value, where)
    elif isinstance(node, str):
        rest = node
        while (shorter := re.sub(r"\$\{[\w.\[\]-]*\}", "", rest)) != rest:
            rest = shorter
        if "${" in rest:
            raise ConfigError(
                f"{where}: '{redact(node)}': a value may refer to another key, as in "
                "${run.name}, and to nothing else (environment variables would be copied into "
                "the run's folder)"
            )


NEEDED = ("data.prompts", "teacher.model", "student.model")
"""What has no default, and a run cannot do without."""


def build_recipe(
    tree: dict[str, Any] | DictConfig,
    overrides: list[str],
    *,
    where: str = "recipe",
    needed: tuple[str, ...] = NEEDED,
) -> Recipe:
    """Builds and checks a recipe.

    Args:
        needed: which of ``NEEDED`` must be given; the others may be missing, and are then "".

    Raises:
        ConfigError: an unknown key (naming the nearest known one), a wrong type, a value out of
        range.
    """
    schema = OmegaConf.structured(Recipe)
    _unlock(schema)
    try:
        layers = [OmegaConf.create(tree), _dotlist(overrides)]
        for layer in layers:
            _refuse_resolvers(OmegaConf.to_container(layer, resolve=False), where)
            for key in layer:
                if isinstance(schema.get(str(key)), DictConfig) and not OmegaConf.is_dict(
                    layer._get_node(key)
                ):
                    raise ConfigError(f"{where}: {key} must be a mapping of keys to values")
        merged = OmegaConf.merge(schema, *layers)
        if merged.student.from_run is not None:
            merged.student.model = str(Path(merged.student.from_run) / "model")
        for name in NEEDED:
            section, key = name.split(".")
            missing = OmegaConf.is_missing(merged[section], key)
            if missing and name not in needed:
                merged[section][key] = ""
            elif name in needed and (missing or merged[section][key] == ""):
                hint = " (or student.from_run)" if section == "student" else ""
                raise ConfigError(f"{where}: {section}.{key} is missing{hint}")
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        full_key = getattr(error, "full_key", None) or ""
        text = str(error).splitlines()[0]
        if "is not a ListConfig" in text:
            text = f"a list is expected: write it in brackets, {full_key}=[...]"
        if "not in" in text or type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
            raise ConfigError(f"{where}: unknown key '{full_key}'; {_hint(full_key)}") from None
        raise ConfigError(": ".join(filter(None, [where, full_key, text]))) from None
    except ConfigError as error:
        raise ConfigError(
            f"{where}: {error}" if not str(error).startswith(where) else str(error)
        ) from None
    return recipe


def load_recipe(
    path: str | Path | None,
    overrides: list[str] | None = None,
    *,
    needed: tuple[str, ...] = NEEDED,
) -> Recipe:
    """Reads a recipe file. Relative paths in it are taken from the working directory.

    Args:
        path: None: all defaults.
        needed: as for ``build_recipe``.

    Raises:
        ConfigError: no such file, not YAML, or what ``build_recipe`` raises.
    """
    if path is None:
        return build_recipe({}, overrides or [], needed=needed)
    path = Path(path)
    if not path.is_file():
        got = "expected a YAML file, got a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"recipe {path}: {got}")
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # yaml and OmegaConf raise a dozen kinds; all mean: not a recipe
        raise ConfigError(f"recipe {path}: not readable as YAML: {_first_problem(error)}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(
            f"recipe {path}: expected a mapping of sections, got {type(tree).__name__}"
        )
    return build_recipe(tree, overrides or [], where=f"recipe {path}", needed=needed)


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML, as written to the run's folder; ``load_recipe`` reads it
    back."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))
