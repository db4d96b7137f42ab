"""`pytest tests/gpu --record HEAD` writes what passed, failed and was skipped to `last_result.json`, file by file."""

from __future__ import annotations

import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import provenance

RESULT = Path(__file__).with_name("last_result.json")
ROOT = Path(__file__).parents[2]


class Recording:
    """A pytest plugin that counts reports by file and writes them when the session ends.

    Args:
        commit: What is tested. ``HEAD`` is looked up in git, and refused if files differ from it.
        result: The file to write.
    """

    def __init__(self, commit: str, result: Path = RESULT) -> None:
        self.run = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": head(self_made=[RESULT]) if commit == "HEAD" else commit,
            "machine": machine(),
        }
        self.result = result
        self.files: dict[str, FileResult] = defaultdict(FileResult)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid.endswith(".py") and not report.passed:
            self.files[_file(report)].add(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[_file(report)].add(report)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus > pytest.ExitCode.TESTS_FAILED or session.shouldfail or session.shouldstop:
            return  # some files did not run to their end
        runs = json.loads(self.result.read_text())["runs"] if self.result.exists() else []
        files = {name: counts.to_json() for name, counts in sorted(self.files.items())}
        self.result.write_text(json.dumps({"runs": merged(runs, self.run | {"files": files})}, indent=1) + "\n")


class FileResult:
    """What the tests of one file came to."""

    def __init__(self) -> None:
        self.passed, self.seconds = 0, 0.0
        self.failed: set[str] = set()
        self.skipped: Counter[str] = Counter()

    def add(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        """Counts one phase of a test, or a file that could not be collected."""
        self.seconds += getattr(report, "duration", 0.0)
        if report.failed:
            self.failed.add(report.nodeid.partition("::")[2] or "collection")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self.passed += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "failed": sorted(self.failed),
            "skipped": dict(sorted(self.skipped.items())),
            "seconds": round(self.seconds, 1),
        }


def merged(runs: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with the new one, whose files replace those that earlier runs had on as many of the same GPUs."""
    same = {name: new["machine"][name] for name in ("gpu", "gpus")}
    kept = []
    for run in runs:
        files = run["files"]
        if same.items() <= run["machine"].items():
            files = {name: counts for name, counts in files.items() if name not in new["files"]}
        if all(run[name] == new[name] for name in ("commit", "machine")):
            new = new | {"files": dict(sorted((files | new["files"]).items()))}
        elif files:
            kept.append(run | {"files": files})
    return [*kept, new]


def machine() -> dict[str, Any]:
    """The GPUs, their driver, and the versions of what the tests exercise."""
    return provenance.machine() | {name: _version(name) for name in ("triton", "lightning", "diffusers")}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _file(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.nodeid.partition("::")[0].removeprefix("tests/gpu/")


def head(self_made: Sequence[Path]) -> str:
    """The commit that is checked out, if nothing differs from it but what the run itself writes.

    Raises:
        pytest.UsageError: If other files differ, or there is no git.
    """
    here = [":/", *(f":!{path.relative_to(ROOT)}" for path in self_made)]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", *here)
    if changed:
        raise pytest.UsageError(
            f"Commit first, or name the commit that is tested; these files were changed:\n{changed}"
        )
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise pytest.UsageError(f"Without git, name the commit that is tested: {done.stderr.strip()}")
    return done.stdout.strip()
