import json
import sys

import pytest

from mxfp8_titan.bench.results import WORST_OF_OPS, Row, command, read, write

ENVIRONMENT = {"gpu": "some GPU", "commit": "abc", "date": "2026-01-01", "command": "one"}


def _ids(path):
    return [row["id"] for row in json.loads(path.read_text())["rows"]]


def test_a_second_command_on_the_same_commit_adds_its_rows(tmp_path):
    path = tmp_path / "gemm.json"
    write(path, ENVIRONMENT, [Row("a", 1.0, "us", "", ""), Row("b", 2.0, "us", "", "")])
    write(path, ENVIRONMENT | {"command": "two", "date": "2026-01-02"}, [Row("b", 3.0, "us", "", "")])
    assert _ids(path) == ["a", "b"]
    found = json.loads(path.read_text())
    assert found["rows"][1]["value"] == 3.0
    assert found["command"] == "one && two"


def test_rows_of_another_commit_or_gpu_are_dropped(tmp_path):
    for other in ({"commit": "def"}, {"gpu": "another"}):
        path = tmp_path / "gemm.json"
        write(path, ENVIRONMENT, [Row("a", 1.0, "us", "", "")])
        write(path, ENVIRONMENT | other, [Row("b", 2.0, "us", "", "")])
        assert _ids(path) == ["b"]


def test_only_rows_of_several_versions_have_their_times(tmp_path):
    path = tmp_path / "kernels.json"
    times = {"here": 1.0, "torchao": None}
    write(path, ENVIRONMENT, [Row("a", 1.0, "us", "", ""), Row("b", 2.0, "x", "", "", times)])
    first, second = json.loads(path.read_text())["rows"]
    assert "us" not in first
    assert second["us"] == times


def test_the_worst_of_all_ops_stays_when_one_op_is_measured_again(tmp_path):
    path = tmp_path / "kernels.json"
    for value, expected in ((1.2, 1.2), (1.0, 1.2), (1.3, 1.3)):
        write(path, ENVIRONMENT, [Row(WORST_OF_OPS, value, "ratio", "<= 1.05", "")])
        assert [row["value"] for row in json.loads(path.read_text())["rows"]] == [expected]


def test_uncommitted_changes_are_no_commit_to_share(tmp_path):
    path = tmp_path / "gemm.json"
    changed = ENVIRONMENT | {"commit": "abc with changes"}
    for name in ("a", "b"):
        write(path, changed, [Row(name, 1.0, "us", "", "")])
    assert _ids(path) == ["b"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": ['])
def test_a_file_that_holds_no_results_is_not_overwritten(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="holds no results of bench.py, and is not overwritten"):
        read(tmp_path / "a.json")
    with pytest.raises(ValueError, match="missing is no folder for results"):
        read(tmp_path / "missing" / "a.json")


def test_a_command_is_what_was_typed_without_where_its_results_go(monkeypatch):
    typed = "/usr/bin/python3 -m a.module --step 3 --json x.json --commit=abc --job.config_file c.toml --json=y.json"
    monkeypatch.setattr(sys, "orig_argv", typed.split())
    assert command() == "python -m a.module --step 3 --job.config_file c.toml"
