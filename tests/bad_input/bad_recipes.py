"""Recipes and command lines that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from case import Bench, Case

from rock_opd.errors import ConfigError, DataError
from rock_opd.recipe_file import load_recipe

SOUND = b"""data: {prompts: p.jsonl}
student: {model: s}
teacher: {model: t}
"""


def recipe(
    id: str, wrong: str, content: bytes, says: str, todo: str, *, borrowed: str | None = None
) -> Case:
    """The sound recipe with this behind it."""
    return whole(id, wrong, SOUND + content, says, todo, borrowed=borrowed)


def whole(
    id: str, wrong: str, content: bytes, says: str, todo: str, *, borrowed: str | None = None
) -> Case:
    """A file of this content."""

    def run(bench: Bench) -> object:
        return load_recipe(bench.write("r.yaml", content))

    return Case(
        id=id,
        area="recipe",
        wrong=wrong,
        run=run,
        error=ConfigError,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


def override(id: str, wrong: str, *overrides: str, says: str, todo: str) -> Case:
    def run(bench: Bench) -> object:
        return load_recipe(bench.write("r.yaml", SOUND), list(overrides))

    return Case(id=id, area="recipe", wrong=wrong, run=run, error=ConfigError, says=says, todo=todo)


def _missing(bench: Bench) -> object:
    return load_recipe(bench.folder / "nowhere.yaml")


def _folder(bench: Bench) -> object:
    (bench.folder / "recipes").mkdir()
    return load_recipe(bench.folder / "recipes")


def _resume_nothing(bench: Bench) -> object:
    from rock_opd.driver import settle_run_dir

    return settle_run_dir(bench.recipe("resume=true"))


def _mirror(uri: str) -> Callable[[Bench], object]:
    """A run about to start, with this mirror."""

    def run(bench: Bench) -> object:
        from rock_opd.driver import settle_run_dir

        return settle_run_dir(bench.recipe(f"run.mirror={uri.format(folder=bench.folder)}"))

    return run


def _mirror_lacks_package(bench: Bench) -> object:
    """A store whose package nobody has."""
    import fsspec

    fsspec.register_implementation(
        "lacking", "no_such_package.FileSystem", clobber=True, errtxt="Install lackingfs"
    )
    return _mirror("lacking://bucket")(bench)


def _mirror_taken(bench: Bench) -> object:
    bench.write("mirror/run/config.yaml", b"")
    return _mirror("file://{folder}/mirror")(bench)


def _mirror_torn(bench: Bench) -> object:
    from rock_opd.driver import settle_run_dir

    bench.write("mirror/run/checkpoints/step_000004/complete.json", b"{")
    return settle_run_dir(bench.recipe(f"run.mirror=file://{bench.folder}/mirror", "resume=true"))


def _from_run(bench: Bench) -> object:
    (bench.folder / "runs" / "first").mkdir(parents=True)
    return bench.inputs(f"student.from_run={bench.folder / 'runs' / 'first'}")


def _said(id: str, wrong: str, run: object, says: str, todo: str) -> Case:
    return Case(id=id, area="recipe", wrong=wrong, run=run, error=ConfigError, says=says, todo=todo)


BOMB = b"x:\n- &a [y, y, y, y, y, y, y, y, y]\n" + b"".join(
    b"- &%c [%s]\n" % (ord("b") + n, b", ".join([b"*%c" % (ord("a") + n)] * 9)) for n in range(9)
)
"""A few hundred bytes, and four thousand million values with its aliases written out."""


CASES = [
    _said(
        "no-recipe",
        "the file does not exist",
        _missing,
        r"^recipe nowhere.yaml: no such file$",
        "Name the file; paths are taken from the working directory.",
    ),
    _said(
        "recipe-folder",
        "a folder in place of a file",
        _folder,
        r"expected a YAML file, got a folder",
        "Name the file in it.",
    ),
    whole(
        "empty-recipe",
        "an empty file",
        b"",
        r"data.prompts is missing",
        "Give data.prompts, student.model and teacher.model.",
    ),
    whole(
        "tab-in-yaml",
        "indented with tabs",
        b"run:\n\tname: x\n",
        r"not readable as YAML: line 2: ",
        "Indent with spaces.",
    ),
    whole(
        "two-colons",
        "two keys in one line",
        b"run: name: x\n",
        r"not readable as YAML: line 1: ",
        "One key a line, or braces: `run: {name: x}`.",
    ),
    recipe(
        "duplicate-section",
        "a section twice",
        b"run: {name: a}\nrun: {name: b}\n",
        r"line 5: found duplicate key run",
        "Merge the two.",
    ),
    whole(
        "list-recipe",
        "a list in place of sections",
        b"- a\n- b\n",
        r"expected a mapping of sections, got ",
        "Begin with `run:`, `data:` and so on.",
        borrowed=r"ListConfig",
    ),
    whole(
        "binary-recipe",
        "not text at all",
        bytes(range(256)),
        r"not readable as YAML",
        "Name the YAML file.",
        borrowed=r"(?<=not readable as YAML: ).*",
    ),
    recipe(
        "latin-1-recipe",
        "another encoding than UTF-8",
        b"log: {wandb_project: caf\xe9}\n",
        r"not readable as YAML",
        "Save it as UTF-8.",
        borrowed=r"(?<=not readable as YAML: ).*",
    ),
    recipe(
        "python-tag",
        "a YAML tag that would run Python",
        b"run: !!python/object/apply:os.system ['echo ran']\n",
        r"could not determine a constructor for the tag",
        "Write plain values; tags are never run.",
    ),
    recipe(
        "deep-yaml",
        "brackets nested five thousand deep",
        b"x: " + b"[" * 5_000,
        r"not readable as YAML",
        "Write a recipe.",
        borrowed=r"(?<=not readable as YAML: ).*",
    ),
    recipe(
        "alias-bomb",
        "aliases of aliases, a huge recipe in a few hundred bytes",
        BOMB,
        r"line \d+: more than 10000 values once its aliases are written out",
        "Write the values out.",
    ),
    recipe(
        "alias-of-itself",
        "an alias that holds itself",
        b"x: &a [*a]\n",
        r"more than 10000 values once its aliases are written out",
        "Write the values out.",
    ),
    recipe(
        "number-for-text",
        "a number where text belongs",
        b"run: {name: 1.10}\n",
        r"run.name: YAML reads this as 1.1 \(float\), and text is expected; write it in quotes",
        "Write `name: '1.10'`.",
    ),
    recipe(
        "boolean-for-text",
        "a word that YAML takes for a boolean",
        b"log: {wandb_project: on}\n",
        r"log.wandb_project: YAML reads this as True \(bool\)",
        "Write `'on'`.",
    ),
    recipe(
        "octal",
        "a number with leading zeros",
        b"run: {name: 007}\n",
        r"line 4: YAML reads 007 as a number in base 8; write it in quotes",
        "Write `'007'` for text, 7 for a number.",
    ),
    recipe(
        "base-60",
        "a time of day, which YAML takes for a number",
        b"run: {start_timeout_s: 12:30}\n",
        r"line 4: YAML reads 12:30 as a number in base 60",
        "Write seconds; text in quotes.",
    ),
    recipe(
        "run-folder-in-a-store",
        "a run's folder in a store",
        b"run: {dir: 's3://bucket/runs'}\n",
        r"run.dir is a path on this machine, got 's3://bucket/runs'; .* is run.mirror",
        "Name a folder; a copy of the run goes to run.mirror.",
    ),
    recipe(
        "prompts-in-a-store",
        "prompts in a store",
        b"eval: {problems: 's3://bucket/p.jsonl'}\n",
        r"eval.problems is a path on this machine",
        "Fetch the file first.",
    ),
    recipe(
        "tilde",
        "a `~` for the home folder",
        b"run: {dir: '~no-such-user/runs'}\n",
        r"run.dir: '~no-such-user/runs' is not expanded here; write it out",
        "Write the whole path, or let the shell expand it.",
    ),
    recipe(
        "long-name",
        "a run's name that no file may have",
        b"run: {name: " + b"a" * 300 + b"}\n",
        r"run.name must have at most 200 characters, got 300",
        "Shorten it.",
    ),
    recipe(
        "long-path",
        "a name in a path that no file may have",
        b"eval: {heldout_prompts: x/" + b"a" * 300 + b".jsonl}\n",
        r"eval.heldout_prompts: the name 'a+...' in it is <n> bytes long, a file's may have 255",
        "Shorten it.",
    ),
    recipe(
        "endless-limit",
        "a time limit beyond any clock",
        b"run: {phase_timeout_s: 1.0e+300}\n",
        r"run.phase_timeout_s must be at most 1e\+08, got 1e\+300",
        "Give seconds; 1e8 are three years.",
    ),
    recipe(
        "too-many-prompts",
        "more prompts a step than any machine holds",
        b"rollout: {prompts_per_step: 1000000000000}\n",
        r"rollout.prompts_per_step must be at most 1e\+06, got 1e\+12",
        "Lower it.",
    ),
    recipe(
        "too-many-threads",
        "more threads than any machine has",
        b"placement: {threads: 1000000}\n",
        r"placement.threads must be at most 4096",
        "Lower it.",
    ),
    recipe(
        "unknown-key",
        "a key that does not exist",
        b"optim: {learning_rate: 1.0e-5}\n",
        r"unknown key 'optim.learning_rate'; optim has: lr, ",
        "Take the name from the list.",
        borrowed=r"(?<=optim has: ).*",
    ),
    recipe(
        "misspelt-key",
        "a key with a slip",
        b"rollout: {temprature: 1.0}\n",
        r"unknown key 'rollout.temprature'; did you mean 'rollout.temperature'\?",
        "Take the name it suggests.",
    ),
    recipe(
        "key-outside-its-section",
        "a key at the top that belongs into a section",
        b"max_new_tokens: 100\n",
        r"did you mean 'rollout.max_new_tokens' or 'eval.max_new_tokens'\?",
        "Indent it under its section.",
    ),
    recipe(
        "word-for-number",
        "a word where a number belongs",
        b"optim: {lr: fast}\n",
        r"optim.lr: Value 'fast'",
        "Write a number.",
    ),
    replace(
        recipe(
            "number-without-point",
            "`1e-5`, which YAML takes for text",
            b"optim: {lr: 1e-5}\n",
            "",
            "Nothing: it is read as the number.",
        ),
        outcome="read",
    ),
    recipe(
        "fraction-for-count",
        "a fraction where a count belongs",
        b"rollout: {prompts_per_step: 2.5}\n",
        r"rollout.prompts_per_step: Value '2.5'",
        "Write a whole number.",
    ),
    recipe(
        "nan-in-recipe",
        "not a number",
        b"optim: {lr: .nan}\n",
        r"optim.lr must lie in \(0, 1\], got nan",
        "Write a number in the range.",
    ),
    recipe(
        "null-in-recipe",
        "null where a value is needed",
        b"run: {seed: null}\n",
        r"run.seed: Incompatible value 'None'",
        "Give a value, or leave the key out.",
    ),
    recipe(
        "section-is-a-word",
        "a value where a section belongs",
        b"optim: adamw\n",
        r"optim must be a mapping of keys to values",
        "Write `optim: {lr: ...}`.",
    ),
    recipe(
        "unknown-choice",
        "a choice that does not exist",
        b"policy: {name: rock_freze}\n",
        r"policy.name must be one of .*, got 'rock_freze'; did you mean 'rock_freeze'\?",
        "Take one of those listed.",
        borrowed=r"(?<=must be one of ).*(?=, got)",
    ),
    recipe(
        "interpolation-to-nothing",
        "a reference to a key that does not exist",
        b"run: {name: '${runs.name}'}\n",
        r"run.name: Interpolation key 'runs.name' not found",
        "Correct the reference.",
    ),
    recipe(
        "environment-in-recipe",
        "a reference to an environment variable",
        b"run: {name: '${oc.env:HOME}'}\n",
        r"a value may refer to another key",
        "Write the value; keys are read from the variable that teacher.api_key_env names.",
    ),
    whole(
        "empty-model-name",
        "a name left empty",
        b"data: {prompts: p.jsonl}\nstudent: {model: ''}\nteacher: {model: t}\n",
        r"student.model is missing",
        "Name the folder or the hub id.",
    ),
    override(
        "override-without-value",
        "an override that is no `key=value`",
        "run.name",
        says=r"override 'run.name' must look like key.sub=value",
        todo="Write `run.name=...`.",
    ),
    override(
        "override-torn",
        "an override cut short by the shell",
        "optim.betas=[0.9,",
        says=r"override 'optim.betas=\[0.9,'",
        todo="Quote what holds brackets or spaces.",
    ),
    override(
        "name-leaves-the-folder",
        "a run name that is a path",
        "run.name=../../etc",
        says=r"run.name must be letters, digits",
        todo="Name the run; run.dir is the folder.",
    ),
    override(
        "biased-policy-gradient",
        "policy gradient at another temperature than 1",
        "loss.divergence=policy_gradient",
        "teacher.payload=sampled",
        "rollout.temperature=0.7",
        says=r"policy_gradient is biased unless rollout.temperature=1",
        todo="Set temperature and top_p to 1, or train on reverse_kl.",
    ),
    override(
        "sampled-log-ratio",
        "a divergence from sampled log-probabilities alone",
        "teacher.payload=sampled",
        says=r"back-propagating the sampled log-ratio drops the teacher",
        todo="Take payload hidden or topk_tail.",
    ),
    override(
        "hidden-from-server",
        "hidden rows asked of an engine that has none",
        "teacher.engine=prompt_logprobs",
        "teacher.payload=hidden",
        says=r"teacher.payload 'hidden' needs teacher.engine 'hidden'",
        todo="Take payload topk_tail.",
    ),
    override(
        "heldout-is-trained-on",
        "held-out prompts that would be trained on",
        "eval.num_heldout=8",
        says=r"held-out prompts must not be trained on",
        todo="Set data.skip, or name eval.heldout_prompts.",
    ),
    override(
        "list-without-a-file",
        "policy list without its list",
        "policy.name=list",
        says=r"policy.ids_file goes with policy.name=list",
        todo="Name policy.ids_file.",
    ),
    _said(
        "resume-of-nothing",
        "resume where no run is",
        _resume_nothing,
        r"resume=true, but .* holds no run",
        "Leave resume out, or name the run.",
    ),
    override(
        "mirror-login",
        "a mirror with a login in it",
        "run.mirror=s3://someone:secret@bucket/runs",
        says=r"run.mirror: s3://\*\*\*@bucket/runs holds a login",
        todo="Give credentials as the store's own variables or files: see docs/security.md.",
    ),
    override(
        "mirror-path",
        "a mirror that is a plain path",
        "run.mirror=/mnt/runs",
        says=r"run.mirror must be one fsspec URI such as",
        todo="Write `file:///mnt/runs`.",
    ),
    override(
        "mirror-relative",
        "a mirror on a relative path",
        "run.mirror=file://mnt/runs",
        says=r"names no absolute path; three slashes",
        todo="Write `file:///mnt/runs`.",
    ),
    _said(
        "mirror-protocol",
        "a mirror of a protocol nobody knows",
        _mirror("s33://bucket/runs"),
        r"run.mirror=s33://bucket/runs/run: fsspec knows no protocol 's33'",
        "Correct it.",
    ),
    _said(
        "mirror-package",
        "a mirror whose package is not installed",
        _mirror_lacks_package,
        r"a package is missing \(Install lackingfs\): install it on every node",
        "Install it; for S3 and Google the extras are `[s3]` and `[gcs]`.",
    ),
    _said(
        "mirror-is-the-folder",
        "a mirror that is the run's own folder",
        _mirror("file://{folder}/runs"),
        r"are one; name another disk or store",
        "Name another place, or leave it out.",
    ),
    _said(
        "mirror-taken",
        "a new run whose mirror holds a run of its name",
        _mirror_taken,
        r"run.mirror=file:.* already holds a run named run: go on with resume=true",
        "Go on with it, or choose another run.name.",
    ),
    Case(
        id="mirror-torn",
        area="recipe",
        wrong="resume where the folder is empty and nothing at the mirror is whole",
        run=_mirror_torn,
        error=DataError,
        says=r"resume: no checkpoint at file:.*: complete.json cannot be read",
        todo="Start over under another name.",
        borrowed=r"(?<=cannot be read \().*(?=\)\);)",
    ),
    _said(
        "from-unfinished-run",
        "a student taken from a run that has not finished",
        _from_run,
        r"student.from_run runs/first: no model/ in it; has that run finished\?",
        "Let it finish, or name a model.",
    ),
]
