"""What the pages tell users to write exists: names, arguments, imports, commands."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import lightning_videoscale as vs
from lightning_videoscale.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block for named, block in found if named == language]


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("videoscale ")]


RUN_BY = {
    "README.md": "test_readme.py",
    "checkpoints.md": "test_pages_run.py",
    "cluster.md": "test_pages_run.py",
    "data.md": "test_pages_run.py",
    "get-started.md": "test_readme.py",
    "graphs.md": "test_pages_run.py",
    "kernels.md": "test_pages_run.py",
    "lora.md": "test_pages_run.py",
    "report.md": "test_pages_run.py",
    "sampling.md": "examples/test_sampling_page.py",
    "schedules.md": "test_pages_run.py",
    "your-model.md": "examples/test_joint_dit.py",
}
"""The test that runs a page's code, but for `pip` and `make`: .ci/run is made of these."""


def test_code_of_every_page_is_run() -> None:
    shown = {page.name for page in PAGES for language in ("python", "bash", "sh") if blocks(page, language)}
    shown |= {page.name for page in PAGES if commands(page)}
    assert shown == set(RUN_BY)
    for page, file in RUN_BY.items():
        assert page.removesuffix(".md").upper() in (ROOT / "tests" / file).read_text().upper().replace("_", "-")


def test_what_make_and_pip_are_told_exists() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"])
    told = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, flags=re.MULTILINE)
    assert len(told) > 10 and {name for pair in told for name in pair if name} <= set(targets)
    asked = {extra for names in re.findall(r"lightning-videoscale\[([\w,]+)\]", text) for extra in names.split(",")}
    assert {"diffusers", "video"} <= asked <= set(extras)


def test_files_that_contributors_are_sent_to_exist() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| to add | touch |")[1].split("\n\n")[0]
    files = {path for path in re.findall(r"`([\w./]+/[\w./]*)`", table) if "NAME" not in path}
    assert len(files) > 20
    assert not [
        path for path in files if not any((top / path).exists() for top in (ROOT, ROOT / "lightning_videoscale"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_imports_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("vs."):
                found: object = vs
                for name in ast.unparse(node).split(".")[1:]:
                    found = getattr(found, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_videoscale"):
                for alias in node.names:
                    assert hasattr(importlib.import_module(str(node.module)), alias.name), alias.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command, comments=True)[1:]
        build_parser(words).parse_args(words)


def sentences(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", text):
        if not paragraph.strip().startswith(("|", "#")):
            prose = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph))
            found += re.split(r"(?<=[.!?])\s+", re.sub(r"^\s*(?:[-*]|\d+\.) ", "", prose.replace("**", "")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > 25] == []


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 3


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return found


def test_the_tables_of_measured_balance_are_those_of_the_files() -> None:
    columns = ["cv_step_mean", "cv_step_median", "cv_step_p95", "compute_cv", "cost_cv", "b_s2_cv"]
    tables = (ROOT / "docs" / "measured.md").read_text()
    before = results("data/balances_25_mb-h200x2")
    shown = [row for row in before if row["draw"] == 0 and row["balance"] != "dual_constraint"]
    assert {row["micro_batches"] for row in shown} == {1, 4}
    for row in results("data/balances-h200x2") + shown + results("data/balances_fsdp2-h200x2"):
        spread = [(max(seconds) - min(seconds)) / max(seconds) for seconds in row["compute_seconds"]]
        assert row["cv_step_mean"] == pytest.approx(sum(spread) / len(spread), abs=1e-3)
        over = f"{row['over_equal_token']:.3g}" if "over_equal_token" in row else ""
        speed = f"{row['tokens_per_second'] / 1e3:.1f} k | {over} | {row['share_of_ceiling']:.1%}"
        spreads = columns if row["strategy"] == "ulysses_ddp" else [*columns[:3], "cv_slot_mean", *columns[3:]]
        figures = " | ".join([speed, *(f"{row[name]:.1%}" for name in spreads)]).replace("%", " %")
        assert f"{figures} |" in tables, f"{row['balance']}, K = {row['micro_batches']}"


def test_the_table_of_all_beside_what_there_is_without_is_that_of_the_file() -> None:
    page = (ROOT / "docs" / "measured.md").read_text()
    with_fa4 = results("suite/today-h200x2")
    for row in with_fa4 + results("suite/today_without_fa4-h200x2"):
        if row.get("round") == -1:
            continue
        over = "1" if row["variant"] == "today" else f"{row['over_today']:.2f}"
        spreads = (f"{row[name]:.1%}".replace("%", " %") for name in ("cv_step_mean", "cv_step_median"))
        speed = f"{row['tokens_per_second']:,.0f}".replace(",", " ")
        assert f" | {' | '.join([speed, over, *spreads])} |" in page, row
    rehearsed = {(row["variant"], row["call"]): row["tokens_per_second"] for row in with_fa4 if row.get("round") == -1}
    assert all(f"had {rehearsed['all', call] / rehearsed['today', call]:.2f} times" in page for call in (1, 3))
    again = {row["variant"]: row for row in results("suite/today_again-h200x2") if "over_today" in row}
    assert f"gave {again['all']['over_today']:.2f} (" in page


@pytest.mark.parametrize("name", ["schedules_by_graphs", "schedules_by_graphs_repeated"])
def test_the_tables_of_schedules_on_two_gpus_are_those_of_the_files(name: str) -> None:
    """Forward and backward together, over the compute alone of the same round."""
    columns = [
        "serial, collective",
        "sliced, collective",
        "serial, symmetric",
        "overlap, symmetric",
        "sliced, symmetric",
    ]
    seconds: dict[tuple[int, int], dict[str, NDArray[np.float64]]] = {}
    for row in results(f"parallel/{name}-h200x2"):
        if row["part"] == "layer" and "round_medians_ms" in row:
            cell, variant = (row["batch_size"], row["s_local"]), f"{row['schedule']}, {row['transport']}"
            of_cell = seconds.setdefault(cell, {})
            of_cell[variant] = of_cell.get(variant, 0) + np.array(row["round_medians_ms"])
    tables = (ROOT / "docs" / "schedules.md").read_text()
    for (samples, tokens), variants in seconds.items():
        over = (f"{np.median(variants[column] / variants['alone, ']):.3f}" for column in columns)
        assert " | ".join([f"| {samples}, {tokens // 1000} {tokens % 1000:03}", *over]) in tables


def test_the_table_of_the_longest_lengths_is_that_of_the_file() -> None:
    table = (ROOT / "docs" / "measured.md").read_text()
    for row in results("cost/longest-h200x2") + results("cost/longest_eighth-h200x2"):
        how = "yes" if row["checkpointing"] else "no", "fused" if row["fused"] else "eager"
        tokens = (f"{row[name]:,}".replace(",", " ") for name in ("longest_fitted_tokens", "predicted_tokens"))
        outcomes = (row[name]["outcome"].replace("_", " ") for name in ("at_0.95", "at_1.05"))
        assert " | ".join([f"| {row['strategy']} | {row['gpus']}", *how, *tokens, *outcomes]) in table, row


def test_the_table_of_recomputed_shares_is_that_of_the_file() -> None:
    table = (ROOT / "docs" / "measured.md").read_text().split("\n## What recomputing")[1]
    for row in results("strategies/recomputed_share-h200"):
        least, most = row["over_all_range"]
        spread = f" ({least:.2f} to {most:.2f})" if row["share"] < 1 else ""
        assert f" {row['over_all']:.3f}{spread} | {row['peak_bytes'] / 2**30:.1f} |" in table, row


def test_the_table_of_the_exchange_of_gradients_is_that_of_the_files() -> None:
    table = (ROOT / "docs" / "measured.md").read_text().replace("**", "")
    taken: dict[str, dict[str, list[str]]] = {}
    for size in ("", "_100_mb"):
        for row in results(f"strategies/gradient_exchange{size}-h200x2"):
            taken.setdefault(row["way"], {}).setdefault(size, []).append(f"{row['over_none'] - 1:.1%}")
    for way, cells in taken.items():
        figures = [figure.replace("%", " %") for of_size in cells.values() for figure in of_size[-3:]]
        assert way == "none" or f"| {' | '.join(figures)} |" in table, way
