"""`rock-opd gradients`: what it draws, groups, writes and refuses; and for real, against
transformers in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import torch

from rock_opd.core.gradients import TypeGradients, type_gradients
from rock_opd.core.objective import reverse_kl
from rock_opd.engines.gradient_rows import GradientMemory
from rock_opd.errors import ConfigError, DataError, NumericsError
from rock_opd.gradients import draw_sample, measure_gradients, type_groups
from rock_opd.models import load_tokenizer, tokenizer_fingerprint
from rock_opd.recipe_file import build_recipe
from rock_opd.rocklist import write_ids

sys.path.insert(0, str(Path(__file__).parent))
from study_files import Response, Watch, file_info, random_responses, write_file

V, H = 1024, 6


class Roles:
    """Stands in for Ray and the engines: hidden states are functions of the token, the gradients
    the real ones."""

    def __init__(self, *, noise: float = 1.0) -> None:
        rng = torch.Generator().manual_seed(1)
        self.student_VH = torch.randn(V, H, generator=rng, dtype=torch.float64)
        self.teacher_VH = self.student_VH + noise * torch.randn(V, H, generator=rng).double()
        self.head_VH = torch.randn(V, H, generator=rng, dtype=torch.float64)
        self.teachers = self.students = self
        self.scored: list[list[str]] = []
        self.announced: list[int] = []
        self.kept: list[list[np.ndarray]] = []

    def turn(self, *roles: str) -> None:
        self.awake = roles

    def score(self, deal, rollouts):
        assert self.awake == ("teacher",)
        self.scored.append([r.key for r in rollouts])

    def clear(self) -> int:
        return 0

    def start_rows(self, num_rows: list[int]) -> None:
        self.announced, self.kept = num_rows, [[] for _ in num_rows]

    def keep_rows(self, batches) -> None:
        assert self.awake == ("student",)
        for kept, part in zip(self.kept, batches, strict=True):
            kept += [b.token_ids[b.predicted] for b in part]

    def type_gradients(self, track) -> tuple[TypeGradients, list[GradientMemory]]:
        assert [sum(map(len, kept)) for kept in self.kept] == self.announced
        ids = torch.from_numpy(
            np.concatenate([np.concatenate(kept) for kept in self.kept if kept]).astype(np.int64)
        )
        track(1, 1)
        found = type_gradients(
            self.student_VH[ids], self.teacher_VH[ids], ids, self.head_VH, self.head_VH
        )
        memory = GradientMemory(
            rows_bytes=10 << 20,
            rows_in_file=False,
            working_bytes=20 << 20,
            block_columns=512,
            peak_rss_bytes=30 << 20,
        )
        return found, [memory] * len(self.kept)


class Bench:
    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models, self.info = folder, models, file_info(models / "student")
        self.watch = Watch()

    def write(self, responses: list[Response], **changes: object) -> Path:
        info = file_info(self.models / "student", **changes)
        return write_file(self.folder / "occ.parquet", info, responses)

    def rocks(self, *ids: int) -> Path:
        path = self.folder / "rocks.json"
        write_ids(path, np.array(ids), tokenizer=self.info.tokenizer)
        return path

    def run(self, occurrences: Path, *overrides: str, roles: Roles | None = None, **kwargs):
        models = [
            f"student.model={self.models / 'student'}",
            f"teacher.model={self.models / 'teacher'}",
        ]
        self.roles = roles or Roles()

        @contextmanager
        def engines(recipe, *, samples, num_real_ids, address, say):
            assert not samples and num_real_ids == V
            self.recipe = recipe
            yield self.roles

        return measure_gradients(
            build_recipe({}, [*models, *overrides], needed=()),
            occurrences,
            kwargs.pop("output", self.folder / "gradients.parquet"),
            rocks=kwargs.pop("rocks", None),
            address=None,
            say=self.watch.say,
            track=self.watch.track,
            engines=engines,
            **kwargs,
        )


@pytest.fixture
def bench(tmp_path, tiny_models) -> Bench:
    return Bench(tmp_path, tiny_models)


def responses_of(*ids: list[int]) -> list[Response]:
    return [
        Response(ids=some, kl=[0.1] * len(some), prompt_id=f"p{i % 2}", step=i // 2)
        for i, some in enumerate(ids)
    ]


# --- what is measured -----------------------------------------------------------------------------


def test_every_type_of_the_file_gets_a_row_with_its_gradient(bench):
    """Two prompts over two steps share their keys; two ranks and many lots share the rows."""
    path = bench.write(random_responses(10, seed=0, num_types=50, length=12))
    report = bench.run(
        path,
        "student.num_ranks=2",
        "teacher.max_batched_tokens=10",
        "student.micro_batch_tokens=30",
    )
    assert len(bench.roles.scored) > 3 and min(bench.roles.announced) > 0
    table = pq.read_table(bench.folder / "gradients.parquet").to_pydict()
    ids = torch.from_numpy(
        np.concatenate([np.concatenate(kept) for kept in bench.roles.kept]).astype(np.int64)
    )
    roles = bench.roles
    expected = type_gradients(
        roles.student_VH[ids], roles.teacher_VH[ids], ids, roles.head_VH, roles.head_VH
    )
    assert sum(table["count"]) == report.facts["num_rows"] == 20 * 12
    assert table["token_id"] == expected.token_ids.tolist()
    for name in ("count", "mean_kl", "magnitude", "cos_balanced", "contribution"):
        np.testing.assert_allclose(table[name], getattr(expected, name), rtol=1e-9, err_msg=name)
    assert sum(table["contribution_share"]) == pytest.approx(1)
    tokenizer = load_tokenizer(str(bench.models / "student"))
    assert table["text"][0] == tokenizer.decode([table["token_id"][0]])
    assert "group" not in table
    assert (bench.folder / "gradients.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(report.files) == sorted(bench.folder.glob("gradients.*"))


def test_responses_of_one_key_from_several_steps_are_told_apart(bench):
    path = bench.write(responses_of([400, 401], [402], [403, 400], [404]))
    report = bench.run(path)
    keys = [key for lot in bench.roles.scored for key in lot]
    assert len(set(keys)) == 4
    assert report.facts["num_rows"] == 6 and report.facts["num_types"] == 5


def test_there_is_room_for_the_longest_response(bench):
    path = bench.write(responses_of([400] * 30, [401]))
    bench.run(path, "rollout.max_prompt_tokens=4", "rollout.max_new_tokens=2")
    assert bench.recipe.rollout.max_model_len >= 32


def test_the_report_is_json_with_the_largest_contributions_first(bench):
    report = bench.run(bench.write(random_responses(8, seed=1)), rocks=bench.rocks(300, 301))
    found = json.loads(report.to_json())
    shares = [row["contribution_share"] for row in found["rows"]]
    assert shares == sorted(shares, reverse=True) and len(shares) == 20
    groups = found["groups"]
    assert groups["rocks"]["num_types"] == 2
    assert (
        sum(groups[n]["num_types"] for n in ("rocks", "rare_high", "other", "single"))
        == (groups["all"]["num_types"])
    )
    assert groups["all"]["contribution_share"] == pytest.approx(1)
    assert any(line.startswith("rocks: 2 types") for line in report.lines)
    assert "10 MiB of rows" in report.lines[-1] and "20 MiB" in report.lines[-1]


def test_a_table_may_be_csv_and_replaces_an_older_one(bench):
    path, output = bench.write(responses_of([400, 401])), bench.folder / "types.csv"
    output.write_text("old")
    bench.run(path, output=output, rocks=bench.rocks(400))
    table = pc.read_csv(output).to_pydict()
    assert table["token_id"] == [400, 401] and table["group"] == ["rocks", "single"]


def test_equal_models_have_no_direction_and_the_report_says_so(bench):
    path = bench.write(responses_of([400, 401, 400]))
    report = bench.run(path, roles=Roles(noise=0.0), rocks=bench.rocks(400))
    assert report.facts["cos_balanced_global"] is None
    assert report.facts["groups"]["all"]["median_cos_balanced"] is None
    assert json.loads(report.to_json())["groups"]["rocks"]["median_magnitude"] == 0


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_written(bench):
    roles = Roles()
    roles.teacher_VH[401] = torch.nan
    with pytest.raises(NumericsError, match=r"1 types is not finite .first: token 401"):
        bench.run(bench.write(responses_of([400, 401])), roles=roles)
    assert not list(bench.folder.glob("gradients*"))


# --- which responses ------------------------------------------------------------------------------


def test_a_file_within_the_limit_is_taken_whole(bench):
    path = bench.write(responses_of([400] * 5, [401] * 7, [402]))
    sample = draw_sample(path, max_rows=13, seed=0)
    assert sample.whole and sample.num_rows == 13
    assert [r.key for r in sample.rollouts] == ["p0#0", "p1#1", "p0#2"]


def test_beyond_the_limit_whole_responses_are_drawn_each_as_likely(bench):
    path = bench.write(responses_of(*[[400 + i] * 5 for i in range(8)]))
    drawn = np.zeros(8)
    for seed in range(200):
        sample = draw_sample(path, max_rows=17, seed=seed)
        assert not sample.whole and sample.num_rows == 15
        assert (sample.num_rollouts_of_file, sample.num_rows_of_file) == (8, 40)
        numbers = [r.sample_idx for r in sample.rollouts]
        assert numbers == sorted(numbers)
        assert all(len(r.positions) == 5 for r in sample.rollouts)
        drawn[numbers] += 1
    # 200 draws of 3 out of 8: 75 each, standard deviation 6.8
    assert drawn.sum() == 600 and (np.abs(drawn - 75) < 28).all()
    again = draw_sample(path, max_rows=17, seed=3)
    assert [r.key for r in again.rollouts] == [
        r.key for r in draw_sample(path, max_rows=17, seed=3).rollouts
    ]


def test_one_response_is_taken_however_long(bench):
    path = bench.write(responses_of([400] * 5, [401] * 7))
    assert len(draw_sample(path, max_rows=1, seed=0).rollouts) == 1


# --- groups ---------------------------------------------------------------------------------------


def test_groups_by_hand():
    nan = np.full(6, np.nan)
    gradients = TypeGradients(
        token_ids=np.array([2, 3, 5, 7, 8, 9]),
        count=np.array([50, 2, 3, 1, 1, 9]),
        mean_kl=np.array([0.1, 2.0, 1.5, 9.0, 0.2, 0.3]),
        magnitude=nan,
        mean_row_magnitude=nan,
        cos_balanced=nan,
        cos_global=nan,
        contribution=nan,
        norm_balanced=1.0,
        norm_global=1.0,
    )
    # 7 has the highest KL but occurs once; 8 is a rock all the same; 4 is a rock nobody sampled
    groups = type_groups(gradients, np.array([2, 4, 8]), num_types=12, num_high=2)
    assert groups.tolist() == ["rocks", "rare_high", "rare_high", "single", "rocks", "other"]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, kwargs, words",
    [
        (["teacher.payload=topk_tail"], {}, "teacher.payload must be hidden, got 'topk_tail'"),
        ([], {"output": Path("x.json")}, "the table is .parquet or .csv, got x.json"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_read(bench, overrides, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        bench.run(bench.folder / "absent.parquet", *overrides, **kwargs)


def test_ids_of_another_tokenizer_are_refused(bench):
    path = bench.write(responses_of([400]), tokenizer="f" * 16)
    with pytest.raises(DataError, match=r"tokenizer f+ .1024 types., the student's"):
        bench.run(path)
    fine = bench.write(responses_of([400]))
    write_ids(bench.folder / "rocks.json", np.array([1]), tokenizer="e" * 16)
    with pytest.raises(DataError, match=r"made with tokenizer e+"):
        bench.run(fine, rocks=bench.folder / "rocks.json")


def test_a_list_that_names_no_tokenizer_is_used_with_a_word(bench):
    (bench.folder / "rock.json").write_text("[400]")
    bench.run(bench.write(responses_of([400, 401])), rocks=bench.folder / "rock.json")
    assert any("nothing tells which tokenizer" in line for line in bench.watch.lines)


def test_a_missing_file_is_said(bench):
    with pytest.raises(DataError, match="no such file"):
        bench.run(bench.folder / "absent.parquet")


# --- for real -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
LIMIT_S = 600


def test_the_command_equals_transformers_in_float64(tiny_models, tmp_path):
    from transformers import AutoModelForCausalLM

    responses = random_responses(6, seed=4, num_types=40, length=15)
    info = file_info(tiny_models / "student")
    path = write_file(tmp_path / "occ.parquet", info, responses)
    write_ids(tmp_path / "rocks.json", np.array([300, 301, 302]), tokenizer=info.tokenizer)
    output = tmp_path / "gradients.parquet"
    args = [
        *(sys.executable, "-m", "rock_opd", "gradients", str(path), "--json", "-o", str(output)),
        *("--rocks", str(tmp_path / "rocks.json"), "run.device=cpu", "student.dtype=float32"),
        *("student.micro_batch_tokens=64", "teacher.dtype=float32", "teacher.max_num_seqs=16"),
        *("teacher.kv_cache_bytes=67108864", "teacher.max_batched_tokens=128"),
        "placement.teacher_cpus=0",
    ]
    done = subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    facts = json.loads(done.stdout)
    assert facts["num_rows"] == 12 * 15 and facts["groups"]["rocks"]["num_types"] == 3
    assert facts["memory"]["peak_rss_bytes"] > facts["memory"]["working_bytes"] > 0

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(
            tiny_models / name, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        for name in ("student", "teacher")
    )
    gradients, ids = [], []
    for response in responses:
        tokens = torch.tensor([[*response.prompt_ids, *response.ids]])
        at = np.arange(len(response.prompt_ids), tokens.shape[1]) - 1
        with torch.no_grad():
            p, q = (model(tokens).logits[0, at] for model in (teacher, student))
        q.requires_grad_()
        gradients.append(torch.autograd.grad(reverse_kl(q, p).sum(), q)[0].numpy())
        ids += response.ids
    g, ids = np.concatenate(gradients), np.array(ids)
    types, count = np.unique(ids, return_counts=True)
    mean = np.stack([g[ids == v].mean(0) for v in types])
    balanced, whole = mean.sum(0), g.sum(0)
    size = np.linalg.norm(mean, axis=1)
    table = pq.read_table(output).to_pydict()
    assert table["token_id"] == types.tolist() and table["count"] == count.tolist()
    cos_balanced = mean @ balanced / size / np.linalg.norm(balanced)
    contribution = count * size * cos_balanced
    for name, expected in (
        ("magnitude", size),
        ("cos_balanced", cos_balanced),
        ("cos_global", mean @ whole / size / np.linalg.norm(whole)),
        ("contribution", contribution),
    ):
        np.testing.assert_allclose(
            table[name], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=name
        )
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")
    assert tokenizer_fingerprint(load_tokenizer(str(tiny_models / "student"))) == info.tokenizer
