"""The environment: every variable has its stated effect, and nonsense is refused."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from emmy import config
from emmy.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_checkout_keeps_its_measurements_in_its_own_datasets_folder() -> None:
    assert config.checkout() == ROOT
    assert config.home() == ROOT / "datasets"


def test_an_installed_emmy_keeps_its_measurements_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "__file__", "/usr/lib/python3/site-packages/emmy/config.py")
    assert config.checkout() is None
    assert config.home().name == "emmy"


def test_another_projects_pyproject_makes_no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    monkeypatch.setattr(config, "__file__", str(tmp_path / "emmy" / "config.py"))
    assert config.checkout() is None


def test_named_folders_win_over_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EMMY_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("EMMY_CACHE", "~/kernels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.home() == tmp_path / "data"
    assert config.cache_dir() == tmp_path / "kernels"


def test_the_cache_is_outside_the_checkout_by_default() -> None:
    assert ROOT not in config.cache_dir().parents


def test_a_file_where_a_folder_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EMMY_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="EMMY_HOME"):
        config.home()


def test_fast_math_takes_a_yes_or_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.fast_math() is False
    monkeypatch.setenv("EMMY_FAST_MATH", "on")
    assert config.fast_math() is True
    monkeypatch.setenv("EMMY_FAST_MATH", "very")
    with pytest.raises(UsageError, match="EMMY_FAST_MATH is 'very', allowed are 1 and 0"):
        config.fast_math()


@pytest.mark.parametrize(("value", "off"), [("1", True), ("Yes", True), ("", False), ("0", False), ("off", False)])
def test_emmy_disable_takes_a_yes_or_a_no(monkeypatch: pytest.MonkeyPatch, value: str, off: bool) -> None:
    monkeypatch.setenv("EMMY_DISABLE", value)
    assert config.disabled() is off


def test_emmy_disable_refuses_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_DISABLE", "maybe")
    with pytest.raises(UsageError, match=r"'maybe', allowed are 1 and 0"):
        config.disabled()


@pytest.mark.parametrize(("value", "plain"), [("1", True), ("anything", True), ("", False)])
def test_no_color_counts_when_it_is_not_empty(monkeypatch: pytest.MonkeyPatch, value: str, plain: bool) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    assert config.no_color() is plain


def test_compilers_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (config.c_compiler(), config.cxx_compiler()) == ("gcc", "g++")
    monkeypatch.setenv("EMMY_CC", "clang")
    monkeypatch.setenv("EMMY_CXX", "clang++")
    assert (config.c_compiler(), config.cxx_compiler()) == ("clang", "clang++")


def test_a_childs_environment_is_this_one_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    env = config.child_env(OMP_NUM_THREADS="3")
    assert env["NO_COLOR"] == "1" and env["OMP_NUM_THREADS"] == "3"


def test_a_pool_inherits_what_is_laid_over_the_environment_which_is_then_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with config.inherited(**config.ONE_THREAD), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert [pool.submit(os.getenv, n).result() for n in config.ONE_THREAD] == list(config.ONE_THREAD.values())
    assert os.environ["OMP_NUM_THREADS"] == "7" and "OPENBLAS_NUM_THREADS" not in os.environ
