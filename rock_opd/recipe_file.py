"""Recipes as files and overrides: read, merged, checked, written back."""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.redact import redact

THRESHOLDS = ("policy.window_threshold", "probe.tau_pre", "probe.tau_post")
"""Text keys that hold a number as often."""
MAX_NODES = 10_000
"""Values of a recipe, with aliases written out."""


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


def _string_keys() -> dict[str, bool]:
    """Dotted keys whose value is text; True where they may be null. A threshold is not among them:
    a number is one as it stands."""
    found = {}
    for section in fields(Recipe):
        if not is_dataclass(section.default_factory):
            continue
        for name, kind in get_type_hints(section.default_factory).items():
            if kind in (str, str | None):
                found[f"{section.name}.{name}"] = kind is not str
    return {key: null for key, null in found.items() if key not in THRESHOLDS}


STRING_KEYS = _string_keys()


def _as_it_stands(key: str, text: str) -> str:
    """An override of a text key: YAML would read 007, 1.10 or on as something else, and end the
    text at a `` #``. Quotes around it, null, and lists (an error later) are YAML's."""
    text = text.strip()
    if text.lower() in ("", "null") or (text == "~" and STRING_KEYS[key]):
        return f"{key}={text}"
    if text[0] in "'\"[{":
        with suppress(yaml.YAMLError):
            if not isinstance(yaml.safe_load(text), int | float):
                return f"{key}={text}"
    return f"{key}={json.dumps(text)}"


def _dotlist(overrides: list[str]) -> DictConfig:
    items = []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not key or not equals:
            raise ConfigError(f"override '{item}' must look like key.sub=value")
        item = _as_it_stands(key, text) if key in STRING_KEYS else item
        try:
            if key not in STRING_KEYS:
                _refuse_odd_yaml(text)
            OmegaConf.from_dotlist([item])
        except Exception as error:  # yaml's and OmegaConf's own kinds
            raise ConfigError(f"override '{item}': {_first_problem(error)}") from None
        items.append(item)
    return OmegaConf.from_dotlist(items)


def _refuse_odd_yaml(text: str) -> None:
    """Refuses what YAML turns into something else than it seems.

    Raises:
        ConfigError: aliases that make a small file a huge recipe, or a number in base 8 or 60.
        yaml.YAMLError: no YAML.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    sizes: dict[int, int] = {}  # by node, aliases written out

    def size(node: yaml.Node | None) -> int:
        if node is None or isinstance(node, yaml.ScalarNode):
            if node is not None and node.style is None and _another_number(node):
                raise ConfigError(
                    f"line {node.start_mark.line + 1}: YAML reads {node.value} as a number in base "
                    f"{60 if ':' in node.value else 8}; write it in quotes if it is text, and "
                    "without leading zeros or colons if it is a number"
                )
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MAX_NODES + 1  # of one that holds itself
            parts = node.value
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(size(part) for part in parts)
        if sizes[id(node)] > MAX_NODES:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: more than {MAX_NODES} values once its aliases "
                "are written out; a recipe has a few hundred"
            )
        return sizes[id(node)]

    size(root)


def _another_number(node: yaml.ScalarNode) -> bool:
    is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    return (
        is_number and re.fullmatch(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-9_.]+)+)", node.value) is not None
    )


def _refuse_other_than_text(layer: DictConfig, where: str) -> None:
    """Refuses numbers, dates and booleans where text belongs: what was typed is lost by then."""
    for key in STRING_KEYS:
        section, name = key.split(".")
        part = layer._get_node(section)
        node = part._get_node(name) if isinstance(part, DictConfig) else None
        value = None if node is None or OmegaConf.is_config(node) else node._value()
        if value is not None and not isinstance(value, str | Path):
            raise ConfigError(
                f"{where}: {key}: YAML reads this as {value!r:.40} ({type(value).__name__}), and "
                "text is expected; write it in quotes"
            )


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
    defaults: tuple[str, ...] = (),
    settle: Callable[[DictConfig], None] | None = None,
) -> Recipe:
    """Builds and checks a recipe.

    Args:
        needed: which of ``NEEDED`` must be given; the others may be missing, and are then "".
        defaults: other values than the schema's, as ``section.key=value``, for what is not given.
        settle: sets keys that follow from others, in the whole recipe with all types right, before
            it is checked.

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
            _refuse_other_than_text(layer, where)
            for key in layer:
                if isinstance(schema.get(str(key)), DictConfig) and not OmegaConf.is_dict(
                    layer._get_node(key)
                ):
                    raise ConfigError(f"{where}: {key} must be a mapping of keys to values")
        merged = OmegaConf.merge(schema, _dotlist([*defaults]), *layers)
        if merged.student.from_run is not None:
            merged.student.model = str(Path(merged.student.from_run) / "model")
        if settle is not None:
            settle(merged)
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
    defaults: tuple[str, ...] = (),
) -> Recipe:
    """Reads a recipe file. Relative paths in it are taken from the working directory.

    Args:
        path: None: all defaults.
        needed, defaults: as for ``build_recipe``.

    Raises:
        ConfigError: no such file, not YAML, or what ``build_recipe`` raises.
    """
    if path is None:
        return build_recipe({}, overrides or [], needed=needed, defaults=defaults)
    path = Path(path)
    try:
        if not path.is_file():
            got = "expected a YAML file, got a folder" if path.is_dir() else "no such file"
            raise ConfigError(f"recipe {path}: {got}")
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # such as a name that no file system takes
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"recipe {str(path)[:200]}: cannot be read: {why}") from None
    try:
        text = content.decode("utf-8")
        _refuse_odd_yaml(text)
        tree = OmegaConf.load(io.StringIO(text))
    except ConfigError as error:
        raise ConfigError(f"recipe {path}: {error}") from None
    except Exception as error:  # yaml and OmegaConf raise a dozen kinds; all mean: not a recipe
        raise ConfigError(f"recipe {path}: not readable as YAML: {_first_problem(error)}") from None
    if not isinstance(tree, DictConfig):
        raise ConfigError(
            f"recipe {path}: expected a mapping of sections, got {type(tree).__name__}"
        )
    return build_recipe(
        tree, overrides or [], where=f"recipe {path}", needed=needed, defaults=defaults
    )


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML, as written to the run's folder; ``load_recipe`` reads it
    back."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))
