"""The page: well-formed, alone in the world, and with the numbers of the log."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.data.planning.figures import StepSpreads
from lightning_videoscale.report import LOG_NAME, RunLog, write_report
from lightning_videoscale.report.charts import duration, number, percent
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from tests.report.simulated import MODEL, SHAPES, add_findings, log_run, planner, resume, start_fields

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects ids, headings and tables' captions."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]} in line {self.getpos()[0]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.text.setdefault(self.open[-1], []).append(data.strip())


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    add_findings(log_run(folder))
    write_report(folder)
    return folder


def test_the_page_is_well_formed_and_refers_to_nothing(run: Path) -> None:
    page = read_page(run / "report.html")
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and {"balance", "throughput", "buckets", "cost", "memory", "kernels"} <= set(ids)
    assert not [entry for entry in page.attributes if entry[1] in {"src", "href", "srcset", "action", "data"}]
    html = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|javascript:", html)
    assert not list(run.glob("*.part"))


def test_headings_captions_and_labels(run: Path) -> None:
    page = read_page(run / "report.html")
    assert len(page.text["h1"]) == 1 and len(page.text["h2"]) >= 10
    html = (run / "report.html").read_text(encoding="utf-8")
    assert html.count("<table>") == html.count("<caption>")
    assert all(
        re.search(r'role="img" aria-label="[^"]+"', part) for part in re.findall(r"<div class=\"chart[^>]*>", html)
    )
    assert '<html lang="en">' in html and "width=device-width" in html and "prefers-color-scheme: dark" in html


def test_the_numbers_are_the_logs(run: Path) -> None:
    records = [json.loads(line) for line in (run / LOG_NAME).read_text().splitlines() if line]
    windows = [record for record in records if record["kind"] == "window"]
    tokens, seconds = sum(w["tokens"] for w in windows), sum(w["seconds"] for w in windows)
    spread = float(np.median(np.concatenate([w["cv_step"] for w in windows])))
    idle = sum(w["idle_seconds"] for w in windows)
    peak = max(record["peak_gib"] for record in records if record["kind"] == "memory")
    shown = read_page(run / "report.html").text["dd"]
    assert shown[0] == number(tokens / seconds)
    assert {percent(spread), percent(idle / seconds), f"{peak:.1f} GiB"} <= set(shown)
    # The table of buckets counts every sample of the plan once, fillers not.
    cells = r'<tr><th scope="row">([^<]+)</th><td class="n">([\d,]+)</td><td class="n wide">([\d,]+)'
    rows = re.findall(cells, (run / "report.html").read_text(encoding="utf-8"))
    expected = {("\N{MULTIPLICATION SIGN}".join(map(str, shape)), f"{s:,}", f"{n:,}") for *shape, s, n in SHAPES}
    assert set(rows) == expected and len(rows) == len(expected)


def test_the_balances_are_those_that_the_planner_makes_of_the_same_clips(run: Path) -> None:
    found = Findings(read_run(run))
    assert found.model is not None
    for balance, spreads in found.predicted.items():
        plan = planner(balance).plan(epoch=0)
        lengths = plan.table.sequence_lengths[plan.shape_id]
        expected = StepSpreads.of(plan, found.model.predict(np.diff(plan.starts), lengths))
        # Not the same permutation, as the samples come in another order.
        assert np.median(spreads.cv_step) == pytest.approx(np.median(expected.cv_step), rel=0.1, abs=0.01)
        assert np.median(spreads.compute_cv) == pytest.approx(np.median(expected.compute_cv), rel=0.1, abs=0.01)
    medians = {balance: float(np.median(spreads.cv_step)) for balance, spreads in found.predicted.items()}
    assert medians["planned"] < 0.3 * medians["dual_constraint"] < 0.3 * medians["equal_token"]


def test_the_fit_finds_the_model_behind_the_times(run: Path) -> None:
    found = Findings(read_run(run))
    assert found.model is not None and found.planner_error is not None
    assert found.model.additive.quadratic == pytest.approx(1.3 * MODEL.additive.quadratic, rel=0.05)
    assert found.planner_error < 0.05


@pytest.mark.parametrize(("balance", "words"), [("planned", "Nearly balanced"), ("equal_token", "Not balanced")])
def test_the_verdict(tmp_path: Path, balance: Any, words: str) -> None:
    log_run(tmp_path, balance)
    found = Findings(read_run(tmp_path))
    assert found.verdict.text.startswith(words)
    advised = [advice.what for advice in found.advice]
    assert ('VideoDataModule(balance="planned")' in advised) == (balance != "planned")


def test_texts_of_others_are_escaped(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    evil = '<script>alert("1")</script>'
    log.append("start", 0, start_fields(module=evil, settings={evil: evil}, callbacks=[evil]))
    log.append("bottleneck", 1, {"name": evil, "figure": evil, "advice": evil})
    log.append("budget", 1, {"adopted": True, "reason": evil, "m_mem": 1, "m_comp": None, "p": 2})
    log.append("injection", 1, {"model": evil, "replaced": [[evil, evil, evil]], "skipped": [[evil, evil, evil]]})
    log.append("end", 1, {"status": "failed", "error": evil})
    html = write_report(tmp_path).read_text()
    read_page(tmp_path / "report.html")
    assert "<script" not in html and "&lt;script&gt;" in html


def test_a_name_of_a_file_that_is_not_utf_8_is_shown_by_its_bytes(tmp_path: Path) -> None:
    log = log_run(tmp_path, steps=20)
    refused = [["caf\udce9-0.tar", "bad.npy", "no header"]]  # as `os.fsdecode` makes it
    log.append(
        "samples", 20, {"indexed": 3, "refused": 1, "first_refused": refused, "too_small": 0, "without_caption": 0}
    )
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "caf\\udce9-0.tar: bad.npy" in page


def test_what_is_missing_is_named_with_what_would_fill_it(tmp_path: Path) -> None:
    RunLog(tmp_path).append("start", 0, start_fields(callbacks=["RunReport", "MemoryMonitor"]))
    html = write_report(tmp_path, tmp_path / "other.html").read_text()
    assert "No step was recorded" in html and "unfinished" in html
    for words in ("Add the callback FusedKernels", "Add the callback BudgetRecalibrator", "Train with VideoDataModule",
                  "MemoryMonitor ran and recorded nothing"):  # fmt: skip
        assert words in html
    assert 'id="memory"' not in html and 'id="balance"' not in html


def test_one_data_parallel_rank_has_no_balance(tmp_path: Path) -> None:
    log_run(tmp_path, dp_size=1, steps=20)
    html = write_report(tmp_path).read_text()
    assert "there is nothing to balance" in html and 'id="balance"' not in html and 'id="cost"' in html


def test_batches_that_do_not_tell_leave_the_spread_of_times(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.append("start", 0, start_fields(2))
    silent = dict.fromkeys(("tokens", "samples", "compute_cv", "cost_cv"))
    parts = {name: [0.5, 0.4] for name in ("data", "forward", "backward", "wait", "exchange", "optimizer", "other")}
    times = {"seconds": 3.0, "slowest_seconds": 1.0, "idle_seconds": 0.1, "cv_step": [0.2, 0.2], "ranks": parts}
    log.append("window", 2, {"steps": 2, "batches": []} | silent | times)
    html = write_report(tmp_path).read_text()
    assert "Not balanced" in html and 'id="balance"' in html and 'id="throughput"' not in html


def test_a_run_that_went_on_with_fewer_ranks_is_drawn_whole(tmp_path: Path) -> None:
    log_run(tmp_path / "first", dp_size=8, steps=40)
    log_run(tmp_path / "then", dp_size=4, steps=40, slowdown=1.0)
    resume(tmp_path / "first", tmp_path / "then", steps=40)
    found = Findings(read_run(tmp_path / "first"))
    seconds = np.array(found.parts()["forward"])
    assert len(seconds) == 8 and found.steps == 80
    windows = [np.array(window["ranks"]["forward"]) for window in found.windows]
    assert seconds[:4] == pytest.approx(np.sum([each[:4] for each in windows], axis=0))
    assert seconds[4:] == pytest.approx(np.sum([each[4:] for each in windows if len(each) == 8], axis=0))
    last = sum(float(window["seconds"]) for window in found.windows if len(window["slowdowns"]) == 4)
    assert found.device_seconds == pytest.approx(4 * last), "what ranks wait is told of those that train in the end"
    assert all(each.rank < 4 for each in found.slow_ranks), "rank 5 was slow, and is no more"
    html = write_report(tmp_path / "first").read_text()
    assert "rank 7" in html and duration(found.device_seconds) in html
    assert "judged by 40 of 80 steps" in html
