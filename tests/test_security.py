"""What docs/security.md promises: nothing is run or read that was not asked for, nothing secret is
written, no name leads out of its folder."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from own_code import with_own_code

from rock_opd.config import Recipe, TeacherConfig
from rock_opd.errors import ConfigError, ModelError
from rock_opd.recipe_file import build_recipe, load_recipe, recipe_yaml
from rock_opd.redact import HIDDEN, redact

ROOT = Path(__file__).parents[1]
SECRET = "hf_Tr0ub4dorAnd3"
NEEDED = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
REMOTE = ("teacher.engine=http", "teacher.payload=topk_tail", "teacher.urls=[http://a:8000]")


# --- files are data, not programs -----------------------------------------------------------------


def calls() -> list[tuple[str, str, dict[str, ast.expr]]]:
    """Every call in the package: where, what (dotted), and its keywords."""
    found = []
    for file in sorted((ROOT / "rock_opd").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                if ast.unparse(node) == "exec('')":
                    continue  # of nothing
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                keywords = {keyword.arg or "**": keyword.value for keyword in node.keywords}
                found.append((where, ast.unparse(node.func), keywords))
    return found


def is_constant(value: ast.expr | None, wanted: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    every, wrong = calls(), []
    assert len(every) > 3000
    for where, what, keywords in every:
        name = what.rpartition(".")[2]
        if (
            (what == "torch.load" and not is_constant(keywords.get("weights_only"), True))
            or (
                what in ("np.load", "numpy.load")
                and not is_constant(keywords.get("allow_pickle"), False)
            )
            or what in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load")
            or what.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "marshal")
            or is_constant(keywords.get("shell"), True)
            or is_constant(keywords.get("trust_remote_code"), True)
            or (
                name == "from_pretrained"
                and "AutoModel" in what
                and "**" not in keywords  # the demo's GGUF, which is no pickle
                and not is_constant(keywords.get("use_safetensors"), True)
            )
        ):
            wrong.append(f"{where} {what}")
    assert not wrong


def test_pickled_weights_are_refused_and_how_to_convert_them_is_said(tiny_models, tmp_path):
    from rock_opd.models import model_facts

    for file in (tiny_models / "student").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match=r"pickles \(pytorch_model.bin\).*save_pretrained"):
        model_facts(str(tmp_path))


def test_a_recipe_is_plain_yaml(tmp_path):
    mark, recipe = tmp_path / "mark", tmp_path / "recipe.yaml"
    recipe.write_text(f"run: !!python/object/apply:os.system ['touch {mark}']\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml: not readable as YAML: line 1"):
        load_recipe(recipe)
    assert not mark.exists()


# --- code that comes with a model -----------------------------------------------------------------


def test_code_of_a_model_runs_only_where_the_recipe_trusts_it(tiny_models, tmp_path):
    """In a process of its own, as `check` does: the code leaves a mark when it runs."""
    model, mark = with_own_code(tiny_models / "student", tmp_path)
    for key in ("teacher", "student"):  # trusting the teacher does not trust the student
        trusted = key == "student"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "rock_opd", "check"),
                str(ROOT / "recipes" / "debug_cpu.yaml"),
                f"student.model={model}",
                f"teacher.model={tiny_models / 'teacher'}",
                f"data.prompts={tiny_models / 'prompts.jsonl'}",
                f"eval.problems={tiny_models / 'problems.jsonl'}",
                f"{key}.trust_remote_code=true",
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                "HF_MODULES_CACHE": str(tmp_path / "modules"),
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert mark.exists() == trusted, done.stdout + done.stderr
        assert ("student.trust_remote_code=true" in done.stdout) == (not trusted), done.stdout


def test_both_roles_trust_nobody_unless_asked():
    assert build_recipe(NEEDED, []).trusted_models == ()
    trusting = build_recipe(NEEDED, ["teacher.trust_remote_code=true"])
    assert trusting.trusted_models == ("t",)


# --- names stay in their folder -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["..", ".", "../up", "/etc/x", "a/b", "a\\b", "a\n", "", "~x"])
def test_a_runs_name_is_one_plain_word(name: str):
    with pytest.raises(ConfigError, match=r"run.name must be letters"):
        build_recipe({**NEEDED, "run": {"name": name}}, [])


def run(folder: Path, *overrides: str) -> Recipe:
    return build_recipe(NEEDED, [f"run.dir={folder}/runs", *overrides])


def test_a_link_does_not_lead_a_run_out_of_the_folder_of_runs(tmp_path):
    from rock_opd.driver import settle_run_dir

    runs, outside = tmp_path / "runs", tmp_path / "outside"
    runs.mkdir()
    outside.mkdir()
    (runs / "link").symlink_to(outside)
    with pytest.raises(ConfigError, match=rf"link is a link to {outside}, outside run.dir"):
        settle_run_dir(run(tmp_path, "run.name=link"))
    (runs / "plain").mkdir()
    (runs / "plain" / "config.yaml").write_text("")
    (runs / "plain-2").symlink_to(outside)
    with pytest.raises(ConfigError, match="plain-2 is a link"):
        settle_run_dir(run(tmp_path, "run.name=plain", "run.on_existing=new"))
    (tmp_path / "other").symlink_to(runs)  # the folder of runs itself may be one
    settled = settle_run_dir(run(tmp_path, "run.name=fresh", f"run.dir={tmp_path / 'other'}"))
    assert settled.run.name == "fresh"


# --- ports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "variable", "joined"),
    [
        (None, None, None),
        ("local", None, None),
        (None, "local", None),
        ("local", "10.0.0.1:6379", None),
        ("auto", "local", None),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("auto", None, "auto"),
        ("10.0.0.1:6379", "local", "10.0.0.1:6379"),
    ],
)
def test_asking_for_a_local_cluster_is_asking_for_one_of_our_own_on_loopback(
    typed, variable, joined, monkeypatch
):
    from rock_opd.driver import cluster_address

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    assert cluster_address(typed) == joined


def test_a_cluster_started_by_the_name_local_listens_on_loopback_alone(tmp_path):
    """In a process of its own, as a command does: every port its processes listen on."""
    script = (
        "import psutil, ray\n"
        "from rock_opd.driver import connect\n"
        "connect('local')\n"
        "me = psutil.Process()\n"
        "for process in (me, *me.children(recursive=True)):\n"
        "    try:\n"
        "        found = process.net_connections(kind='tcp')\n"
        "    except psutil.Error:\n"
        "        continue\n"
        "    for one in found:\n"
        "        if one.status == psutil.CONN_LISTEN:\n"
        "            print('listens', one.laddr.ip)\n"
        "ray.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    heard = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")}
    assert heard, done.stderr
    assert heard <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.parametrize("address", ["nonsense", "host:port", "http://host:8265", "os://x"])
def test_an_address_that_is_none_is_an_error_that_shows_what_one_looks_like(address):
    from rock_opd.driver import connect

    with pytest.raises(ConfigError, match=r"cannot join a Ray cluster at .* such as 10.0.0.1:6379"):
        connect(address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("[::1]:1", "Connection refused|Cannot assign|not supported"),
        ("nowhere.invalid:6379", "not known|resolution"),
        ("127.0.0.1:99999999999999999999", "too large"),
    ],
)
def test_a_cluster_address_at_which_nothing_listens_is_told_without_asking_ray(
    address, why, monkeypatch
):
    from rock_opd.driver import connect

    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was asked"))
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at '.*': .*({why}).*; does"):
        connect(address)


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["${oc.env:HF_TOKEN}", "x${oc.env:${run.dir}}", "${oc.decode:'1'}", "${oc.env:A,b}"]
)
def test_a_recipe_cannot_copy_the_environment_into_the_runs_folder(value: str, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for recipe, overrides in (
        ({**NEEDED, "data": {"prompts": value}}, []),
        (NEEDED, [f"policy.guard_file={value}"]),
        ({**NEEDED, "teacher": {"model": "t", "urls": [value]}}, []),
    ):
        with pytest.raises(ConfigError, match="may refer to another key") as caught:
            build_recipe(recipe, overrides)
        assert SECRET not in str(caught.value)
    named = build_recipe(NEEDED, ["run.name=a", "data.prompts=${run.name}.jsonl"])
    assert named.data.prompts == "a.jsonl"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.api_key_env=sk-Tr0ub4dor", "is the NAME of an environment variable"),
        ("teacher.api_key_env=hf_Tr0ub4dor", "is the NAME of an environment variable"),
        ("teacher.api_key_env=TR0UB4DOR", "is the NAME of an environment variable"),
        ("teacher.urls=[http://me:Tr0ub4dor@host]", r"\*\*\*@host holds a login"),
        ("teacher.urls=['http://host/?key=Tr0ub4dor']", "http://host/ holds a login, a query"),
        ("log.mlflow_uri=http://me:Tr0ub4dor@host", "log.mlflow_uri holds a login"),
        ("log.mlflow_uri=http://me:x/Tr0ub4dor@host", "log.mlflow_uri holds a login"),
        ("log.mlflow_uri=http://x/Tr0ub4dor@host", "log.mlflow_uri holds a login"),
        ("log.mlflow_uri=http://host/?token=Tr0ub4dor", "log.mlflow_uri holds a login"),
        ("teacher.urls=['http://me:Tr0/ub4dor@host']", r"http://\*\*\*@host holds a login"),
        ("teacher.urls=['http://Tr0/ub4dor@host']", r"http://\*\*\*@host holds a login"),
        ("run.mirror=s3://AKIA:Tr0ub4dor/x@bucket/runs", r"s3://\*\*\*@bucket/runs holds a login"),
        ("run.mirror=s3://AKIA:x/Tr0ub4dor@bucket/runs", r"s3://\*\*\*@bucket/runs holds a login"),
        ("run.mirror=s3://x/Tr0ub4dor@bucket/runs", r"s3://\*\*\*@bucket/runs holds a login"),
        ("run.mirror=x::s3://a:Tr0ub4dor@bucket/runs", r"s3://\*\*\*@bucket/runs holds a login"),
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(override: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        build_recipe(NEEDED, [*REMOTE, override])
    assert "ub4dor" not in str(caught.value).lower()


def test_a_folder_with_an_at_sign_in_its_name_may_be_a_mirror():
    uri = "file:///home/me@work.example/runs"
    assert build_recipe(NEEDED, [f"run.mirror={uri}"]).run.mirror == uri


def test_servers_go_with_the_engine_that_asks_them():
    for change, message in (
        ({"engine": "http"}, "teacher.urls goes with teacher.engine=http"),
        ({"urls": ("http://a",)}, "teacher.urls goes with teacher.engine=http"),
        ({"engine": "http", "urls": ("http://a",), "payload": "hidden"}, "needs teacher.engine"),
        ({"engine": "http", "urls": ("a:8000",)}, "'a:8000' is no address"),
        ({"engine": "http", "urls": ("http://a:99999",)}, "is no address"),
        ({"engine": "http", "urls": ("http://a", "http://a")}, "names a server twice"),
        ({"engine": "http", "urls": ("http://a",), "max_concurrency": 1, "num_replicas": 2}, "one"),
    ):
        with pytest.raises(ConfigError, match=message):
            TeacherConfig(**({"model": "t", "payload": "sampled"} | change))
    recipe = build_recipe(NEEDED, list(REMOTE))
    assert recipe.teacher.urls == ("http://a:8000",) and recipe.teacher.remote


def test_what_is_said_and_written_has_no_secret_in_it(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("MY_API_KEY", "EMPTY")  # a word, not a secret
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/home/me/token-file")
    text = f"401 for {SECRET}, EMPTY, /home/me/token-file, http://me:p@ss@host/x, Bearer abc.def"
    assert redact(text) == (
        f"401 for {HIDDEN}, EMPTY, /home/me/token-file, http://{HIDDEN}@host/x, Bearer {HIDDEN}"
    )


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("s3://AKIA:se/cret@bucket/runs", f"s3://{HIDDEN}@bucket/runs"),
        ("at http://me:a/b/c@host:80/x, twice", f"at http://{HIDDEN}@host:80/x, twice"),
        ("http://host:80/x me@host", "http://host:80/x me@host"),
        ("http://host/user@x", "http://host/user@x"),
        ("https://b/x?sv=1&sig=abc%3D&se=2", f"https://b/x?sv=1&sig={HIDDEN}&se=2"),
        ("Authorization: Basic dXNlcjpwYXNz", f"Authorization: Basic {HIDDEN}"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", f"{{'authorization': 'Basic {HIDDEN}'}}"),
        ("X-Api-Key: abc", f"X-Api-Key: {HIDDEN}"),
        ("a basic example", "a basic example"),
    ],
)
def test_logins_and_authorization_headers_are_hidden_and_other_words_are_not(said, shown):
    assert redact(said) == shown


@pytest.mark.parametrize(
    "name",
    [
        *("DB_PASS", "DB_PWD", "SSH_PASSPHRASE", "GITHUB_PAT", "AWS_CREDENTIALS", "API_KEYS"),
        *("db_password", "my_token", "PGPASSWORD", "MY_SECRETS"),
    ],
)
def test_the_value_of_a_variable_named_like_a_secret_is_hidden(name, monkeypatch):
    monkeypatch.setenv(name, SECRET)
    assert redact(f"said {SECRET}") == f"said {HIDDEN}"


def test_the_working_directory_and_the_path_of_a_key_file_are_no_secrets(monkeypatch, tmp_path):
    file = tmp_path / "credentials.json"
    file.write_text("{}")
    monkeypatch.setenv("PWD", "/somewhere/else/entirely")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    text = f"/somewhere/else/entirely {file}"
    assert redact(text) == text


def test_the_runs_folder_and_the_command_line_hide_secrets(monkeypatch, tmp_path, capsys):
    from rock_opd.cli import main
    from rock_opd.runlog import RunLog

    monkeypatch.setenv("HF_TOKEN", SECRET)
    recipe = run(tmp_path, f"data.prompts={SECRET}.jsonl")
    log = RunLog(recipe, resume_step=None)
    log.event("replace", 1, cause=f"the server said: Bearer {SECRET}", text=SECRET)
    log.summary({"error": SECRET})
    log.close()
    written = [file for file in recipe.run_dir.rglob("*") if file.is_file()]
    assert len(written) >= 4
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]
    assert HIDDEN in (recipe.run_dir / "events.jsonl").read_text()
    monkeypatch.setattr(sys, "argv", ["rock-opd", "train", f"{tmp_path}/{SECRET}.yaml"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out = capsys.readouterr()
    assert stopped.value.code == 2 and f"{HIDDEN}.yaml: no such file" in out.err
    assert SECRET not in out.out + out.err


def test_a_recipe_that_names_servers_survives_the_way_to_a_file_and_back(tmp_path):
    recipe = build_recipe(NEEDED, [*REMOTE, "teacher.api_key_env=TEACHER_API_KEY"])
    (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
    again = load_recipe(tmp_path / "config.yaml")
    assert again == replace(recipe)
