"""Published results say whether the code that they measured is still there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import measured_code
from benchmarks.measured_code import MARK, MEASURES, RESULTS, ROOT, fingerprint, is_older, marked, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_pages_mark_results_of_older_code(page: Path) -> None:
    text = page.read_text()
    assert marked(text) == text, "run: python benchmarks/measured_code.py"


@pytest.mark.parametrize("benchmark", MEASURES)
def test_what_a_benchmark_measures_is_there(benchmark: str) -> None:
    assert (ROOT / "benchmarks" / f"{benchmark}.py").is_file()
    assert all((ROOT / path).exists() for path in MEASURES[benchmark])


@pytest.mark.parametrize("result", sorted(RESULTS.rglob("*.json")), ids=lambda result: result.stem)
def test_a_result_says_what_it_measured(result: Path) -> None:
    found = json.loads(result.read_text())
    assert {"benchmark", "date", "commit", "code", "machine", "settings", "rows"} <= found.keys()
    assert found["benchmark"] in MEASURES and len(found["commit"]) >= 7


CODE = '"""Says."""\n\n\ndef double(x: int) -> int:\n    """Doubles."""\n    return 2 * x  # twice\n'


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("# twice", "# two times"), True),
        (("Doubles.", "Makes it twice as large."), True),
        ((": int", ": float"), True),
        (("2 * x", "(2 *\n        x)"), True),
        (("2 * x", "x + x"), False),
        (("2 *", "3 *"), False),
    ],
)
def test_code_counts_and_words_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str], same: bool
) -> None:
    monkeypatch.setitem(MEASURES, "its", ("code.py", "kernels"))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "rows.cu").write_text("// rows")
    (tmp_path / "code.py").write_text(CODE)
    before = fingerprint("its", tmp_path)
    (tmp_path / "code.py").write_text(CODE.replace(*change))
    assert (fingerprint("its", tmp_path) == before) is same
    (tmp_path / "kernels" / "rows.cu").write_text("// columns")
    assert fingerprint("its", tmp_path) != before


def test_links_are_marked_and_marks_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_code, "RESULTS", tmp_path)
    new, old = ({"benchmark": "data/plan", "code": code} for code in (fingerprint("data/plan"), "another"))
    for name, result in (("new", new), ("old", old)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert not is_older(tmp_path / "new.json") and is_older(tmp_path / "old.json")
    text = f"([file](../benchmarks/results/old.json)), [2 GPUs{MARK}](benchmarks/results/new.json)"
    expected = f"([file{MARK}](../benchmarks/results/old.json)), [2 GPUs](benchmarks/results/new.json)"
    assert marked(text) == expected == marked(expected)


def test_an_unlisted_benchmark_is_named() -> None:
    with pytest.raises(ValueError, match=r"'data/nothing'.*MEASURES"):
        fingerprint("data/nothing")
