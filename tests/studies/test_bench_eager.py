"""Short calls where the host's time counts: the rehearsal runs, and a cut-off run keeps its rows."""

import json

import pytest

from studies.bench import eager


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"bar": 1.1, "ratio": 1.2, "most": None}, "holds"),
        ({"bar": 1.1, "ratio": 1.0, "most": None}, "MISSED"),
        ({"bar": None, "ratio": None, "most": 20.0}, "holds"),
        ({"bar": None, "ratio": None, "most": 9.0}, "MISSED"),
        ({"bar": None, "ratio": 2.0, "most": None}, ""),
    ],
)
def test_a_bar_holds_or_is_missed(found, said):
    assert eager.verdict(found | {"microseconds": {"tilewise": 10.0}}).endswith(said)


def test_a_contender_that_fails_has_a_reason_and_no_time():
    def refused():
        raise ValueError("not this one")

    seconds, why = eager.race({"a": lambda: lambda device, count: 2.0, "b": refused}, "cpu", min, 3)
    assert seconds == {"a": 2.0}
    assert "not this one" in why["b"]


def test_every_row_is_written_at_once(tmp_path):
    eager.main(["--quick", "--device", "cpu", "--results", str(tmp_path)])
    (path,) = tmp_path.rglob("eager.json")
    content = json.loads(path.read_text())
    assert content["processor"]
    assert eager.results.unpacked(content)["rows"][0]["call"] == "ViT-B 197"


def test_the_ratio_is_to_the_fastest_of_pytorchs(capsys):
    row = eager.row(
        "x", "eager", "backward", {"tilewise": 1.0, "tilewise triton": 0.1, "sdpa a": 3.0, "sdpa b": 2.0}, {}
    )
    assert (row["ratio"], row["bar"]) == (2.0, 1.1)
    assert "holds" in capsys.readouterr().out
