"""`outrider simulate` on devices so fast that every cell takes a moment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deploy.cli import main
from deploy.simulation.pair import read_acceptance

QUICK = ("simulate", "--target", "1:2,32:4", "--draft", "0.2", "--seconds", "0.15", "--batches", "1,4", "--k", "3")


def test_it_measures_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main([*QUICK, "--modes", "none,colocated", "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    document = json.loads(file.read_text())
    cells = {(cell["batch"], cell["mode"]): cell for cell in document["cells"]}
    assert set(cells) == {(1, "none"), (1, "colocated"), (4, "none"), (4, "colocated")}
    for cell in cells.values():
        measured = cell["measured"]
        assert measured["rounds"] >= 2
        assert measured["target_ms"] == pytest.approx(cell["predicted"]["target_ms"], rel=0.01)
        assert measured["tokens_s"] < cell["predicted"]["tokens_s"] * 1.5
    assert cells[4, "colocated"]["measured"]["hit"] == 1.0
    assert cells[4, "colocated"]["measured"]["tokens"] == pytest.approx(
        cells[4, "colocated"]["played"]["tokens"], rel=0.1
    )
    assert "best k" in shown


def test_acceptance_of_a_real_pair(tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    file.write_text(json.dumps({"acceptance": {"code": [0.9, 0.7, 0.5], "chat": [0.5, 0.3]}}))
    assert read_acceptance(file, "code").alphas == (0.9, 0.7, 0.5)
    assert read_acceptance(file, None).alphas == pytest.approx((0.7, 0.5))
    with pytest.raises(ConfigError, match="no workload 'json'; there are code, chat"):
        read_acceptance(file, "json")
    for wrong in ("{}", "[1]", "x", '{"acceptance": {"code": []}}', '{"acceptance": {"code": ["x"]}}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"pair\.json"):
            read_acceptance(file, None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_acceptance(tmp_path / "absent.json", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--modes", "none,magic"), "--modes 'none,magic'"),
        (("--batches", "0"), "--batches '0': write numbers from 1 to 64"),
        (("--k", "two"), "--k 'two'"),
        (("--target", "8:x"), "step times '8:x'"),
        (("--alpha", "1.5"), "acceptance must be"),
        (("--seconds", "0"), "seconds must be above 0"),
        (("--kill-after", "9"), "--kill-after 9.0: write a time within"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *words]) == 2
    assert said in capsys.readouterr().err
