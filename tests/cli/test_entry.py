"""What every verb has in common: help with examples, exit codes, sentences, JSON, a quick start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import emmy as package
from emmy import api
from emmy.cli.entry import VERBS
from emmy.errors import EmmyError
from tests.cli.conftest import OP, Emmy, FakeDevice

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "numpy",
    "torch",
    "lightgbm",
    "duckdb",
    "optuna",
    "rich",
    "sklearn",
    "platformdirs",
    "tomllib",
    "multiprocessing",
)


def loaded_by(code: str) -> set[str]:
    """Modules that a fresh Python has loaded after `code`."""
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "from emmy.cli import main; main(['--help'])",
        "from emmy.cli import main; main(['tune', '--help'])",
        "import emmy",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) & set(HEAVY) == set()


def test_importing_emmy_loads_no_module_of_emmy() -> None:
    assert {m for m in loaded_by("import emmy") if m.startswith("emmy")} <= {"emmy"}


def test_help_names_every_verb_in_a_line_and_shows_an_example(emmy: Emmy) -> None:
    said = emmy("--help")
    assert said.code == 0 and said.err == ""
    for verb in VERBS:
        assert f"    {verb.name} " in said.out or f"    {verb.name}\n" in said.out
        assert verb.summary in " ".join(said.out.split())
    assert "example:\n  emmy tune matmul:" in said.out and "130 interrupted" in said.out


@pytest.mark.parametrize("verb", [v.name for v in VERBS])
def test_every_verb_has_help_with_examples_and_the_exit_codes(emmy: Emmy, verb: str) -> None:
    said = emmy(verb, "--help")
    assert said.code == 0
    assert f"examples:\n  emmy {verb}" in said.out and "exit codes: 0 ok" in said.out


@pytest.mark.parametrize("example", [e for verb in VERBS if verb.has_tasks for e in verb.examples])
def test_every_task_has_help_with_its_example(emmy: Emmy, example: str) -> None:
    verb, task = example.split()[:2]
    said = emmy(verb, task, "--help")
    assert said.code == 0 and f"example:\n  emmy {example}" in said.out and "--json" in said.out


def every_example() -> list[str]:
    return [e for verb in VERBS for e in verb.examples]


@pytest.mark.parametrize("example", every_example())
def test_every_example_of_the_help_can_be_parsed(example: str) -> None:
    import shlex

    from emmy.cli.entry import parser

    assert parser().parse_args(shlex.split(example)).verb.name == example.split()[0]


BAD = [
    (2, [], "VERB"),
    (2, ["nonsense"], "invalid choice"),
    (2, ["tune"], "required"),
    (2, ["tune", "matmul:64x64"], "shape"),
    (2, ["tune", "conv:1x1"], "the kind before the colon is not one of attention, bmm"),
    (2, ["show", "matml:8x8x8:f32"], "Did you mean matmul? An example is"),
    (2, ["show", "@gemma4-12c"], "no workload is named '@gemma4-12c'. Did you mean @gemma4-12b?"),
    (2, ["tune", "@nothing"], "no workload"),
    (2, ["tune", OP, "--budget", "soon"], "such as 60s"),
    (2, ["tune", OP, "--threads", "0"], "positive"),
    (2, ["tune", OP, "--threads", "100000"], "threads"),
    (2, ["tune", OP, "--strategy", "luck"], "luck"),
    (2, ["tune", OP, "--model", "nowhere.txt"], "nowhere.txt"),
    (3, ["tune", OP, "--gpu", "rtx9090"], "no target is named"),
    (2, ["show", OP, "k0/split(q,serial,4)"], "no axis q"),
    (2, ["show", OP, "split"], "has not the form"),
    (2, ["show", OP, "--ir", "llvm"], "no level is named"),
    (2, ["show", "plan:nothing"], "no plan is named"),
    (2, ["show", "plan:splitk", "k0/split(m,grid,4)"], "has its own schedule"),
    (3, ["show", OP, "--gpu", "rtx9090"], "no target is named"),
    (2, ["bench", OP], "nothing is stored"),
    (2, ["bench", OP, "--schedule", "k0/split(q,serial,4)"], "no axis q"),
    (3, ["bench", OP, "--gpu", "h200", "--schedule", ""], "h200 is not here"),
    (3, ["bench", OP, "--gpu", "h200"], "h200 is not here"),
    (2, ["verify"], "nothing is stored"),
    (2, ["explain", "matmul"], "matmul"),
    (2, ["train-costmodel", "--gpu", "rtx3090"], "no measurements"),
    (2, ["data", "query", "SELECT nonsense"], "the query failed"),
    (2, ["data", "export", "--gpu", "rtx3090", "--out", "x"], "no measured rows"),
    (2, ["cache", "burn"], "invalid choice"),
    (2, ["bench", OP, "--against", "cublas"], "(choose from "),
    (2, ["train-costmodel", "--rollback"], "holds no model"),
    (2, ["export", OP, "--out", ""], "the folder's name is empty"),
    (2, ["data", "stats", "--home", ""], "the folder's name is empty"),
    (2, ["data"], "TASK"),
    (2, ["tune", OP, "--budget", "roof=90"], "at most roof=1"),
    (2, ["tune", OP, "--home", __file__], "test_entry.py is a file: name a folder"),
    (2, ["pack", "build", OP, "--out", ""], "the file's name is empty"),
    (2, ["pack", "build", OP, "--out", str(ROOT)], "is a folder: name a file in it"),
    (2, ["pack", "build", OP, "--out", f"{__file__}/x"], "test_entry.py is a file: name a folder"),
    (
        2,
        ["pack", "build", OP, "--out", "x", "--threads", "2"],
        f"with 2 threads of {OP}. Tune first: `emmy tune OP --gpu cpu --threads 2`",
    ),
    (2, ["bench", "kernels", OP, "--out", ""], "the folder's name is empty"),
    (2, ["bench", "kernels", OP, "--out", f"{__file__}/x"], "test_entry.py is a file: name a folder"),
    (2, ["bench", "kernels", OP, "--out", "x", "--seconds", "nan"], "invalid seconds value: 'nan'"),
    (2, ["bench", "kernels", OP, "--out", "x", "--compilers", "-1"], "invalid count value: '-1'"),
    (2, ["bench", "report", "x", "--svg", str(ROOT)], "is a folder: name a file in it"),
    (1, ["bench", "report", __file__], "test_entry.py is damaged, or no Parquet file"),
    (2, ["bench", "kernels", OP, "--out", "a" * 300], "File name too long"),
    (2, ["pack", "build", OP, "--out", "a" * 300], "File name too long"),
    (2, ["pack", "build", OP, "--out", "\udcff"], "is no UTF-8"),
    (2, ["bench", "kernel", OP], "'kernel' is no op, which has a colon or begins with @, nor a task"),
    (2, ["bench", "--rounds", "3", "kernels", OP], "the first word after `emmy bench`"),
    (2, ["verify", OP], f"nothing is stored on cpu of {OP}"),
]


@pytest.mark.parametrize(("code", "argv", "sentence"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_what_cannot_be_done_is_said_in_a_sentence_with_the_right_exit_code(
    emmy: Emmy, code: int, argv: list[str], sentence: str
) -> None:
    said = emmy(*argv)
    assert (said.code, said.out) == (code, ""), said.err
    assert sentence in said.err and "Traceback" not in said.err and "fault in Emmy" not in said.err


def test_with_json_an_error_is_an_object_too(emmy: Emmy) -> None:
    said = emmy("tune", "conv:1x1", "--json")
    (error,) = said.of("error")
    assert (said.code, error["error"], error["exit_code"]) == (2, "UsageError", 2)
    assert str(error["message"]) in said.err


def test_a_fault_of_emmy_itself_is_one_line_and_verbose_shows_where(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(api, "explain", broken)
    said = emmy("explain", OP)
    assert said.code == 1 and said.err.count("\n") == 1 and "ZeroDivisionError" in said.err and "--verbose" in said.err
    assert "in broken" in emmy("explain", OP, "--verbose").err


def test_what_the_system_refuses_is_named_with_its_file_and_is_no_fault_of_emmy(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/disk")

    monkeypatch.setattr(api, "explain", full)
    said = emmy("explain", OP)
    assert said.code == 1 and "/full/disk: No space left on device. Free space" in said.err
    assert "fault in Emmy" not in said.err and said.err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_not_taken_for_a_full_disk(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/not/mine")

    monkeypatch.setattr(api, "explain", refused)
    said = emmy("explain", OP)
    assert said.code == 1 and "/not/mine: Permission denied. Name a place that can be written" in said.err


@pytest.mark.parametrize(
    "redirected", [*(pytest.param(r, marks=pytest.mark.slow) for r in (">&-", "2>&-")), ">&- 2>&-", "2>/dev/full"]
)
def test_a_closed_or_full_stream_is_no_fault(redirected: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "EMMY_HOME": str(tmp_path)}
    command = f"{sys.executable} -m emmy show matmul:4x4x4:f32 --ir op {redirected}"
    done = subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    said = emmy("data", "stats")
    assert said.code == 1 and "pip install 'emmy[tune]'" in said.err


def test_an_error_of_the_library_keeps_its_own_exit_code(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(EmmyError):
        exit_code = 77

    def odd(*_: object, **__: object) -> None:
        raise Odd("as it is")

    monkeypatch.setattr(api, "explain", odd)
    assert emmy("explain", OP).code == 77


def test_ctrl_c_outside_a_search_ends_with_130(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "explain", interrupted)
    assert emmy("explain", OP).code == 130


def test_ctrl_c_within_a_query_of_the_database_ends_with_130_too(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    def query(*_: object, **__: object) -> None:
        raise RuntimeError("Query interrupted")  # as DuckDB does where Python would raise KeyboardInterrupt

    monkeypatch.setattr(api, "explain", query)
    assert emmy("explain", OP).code == 130


def test_a_reader_that_goes_away_is_no_error() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"{sys.executable} -m emmy show plan:all | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


def test_the_version_is_the_one_that_is_packaged(emmy: Emmy) -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert emmy("--version").out == f"emmy {project['version']}\n"


def test_the_public_names_are_there(fake_device: FakeDevice) -> None:
    assert {name for name in package.__all__ if getattr(package, name) is None} == set()
    assert set(package.__all__) <= set(dir(package))
    assert package.__getattr__("api") is api  # `emmy.api.table` in the docs, after `import emmy` alone
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # type: ignore[attr-defined]  # noqa: B018
