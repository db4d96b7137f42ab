"""One rank's part: pytest over files of diffusers' tests, every model fused or split or both as it is constructed.

Ranks run the same tests in the same order. After each one they tell each other how it ended, through a store and not
through the groups that a failure may have left behind.
"""

from __future__ import annotations

import functools
import io
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_videoscale.families import AllFamilies
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel import SequenceMesh, find_plan, parallelize
from lightning_videoscale.parallel.layout.heads import attention_sizes

Way = Literal["split", "fused", "fused and split"]
"""What is done to every model. Fused alone, the tests run in one process."""


IN_ANOTHER_PROCESS = "test_from_save_pretrained_dynamo"
"""Starts a process that knows nothing of what is done to models here."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended on all ranks.

    Attributes:
        result: ``"passed"``, ``"failed"`` or ``"skipped"``; what each rank says if they differ, as ``"passed/failed"``.
        message: The traceback of each rank that failed, or rank 0's reason to skip.
        calls: Calls of the models on rank 0.
        injected: What was fused in its models there, and what was left as it is and why.
    """

    result: str
    message: str
    calls: int
    injected: frozenset[str] = frozenset()


def run_in_step(
    parent: Path, files: Sequence[str], select: str = "", wait: float = 60.0, way: Way = "split"
) -> dict[str, Outcome]:
    """Runs files on this rank, all ranks together.

    Args:
        parent: The folder in which `PACKAGE` lies. Ranks meet in it.
        files: Paths from there.
        select: As pytest's ``-k``.
        wait: Seconds that an exchange may wait for the other ranks.
        way: What is done to every model.

    Returns:
        How each test ended, by its name as pytest writes it.

    Raises:
        RuntimeError: If pytest could not run the tests, with what it printed.
    """
    rank = dist.get_rank()
    store = dist.FileStore(str(parent / f"store-{'-'.join(Path(file).stem for file in files)}"), dist.get_world_size())
    store.set_timeout(timedelta(seconds=3 * wait))  # for a rank whose exchange waits in vain
    plugin = InStep(store, timedelta(seconds=wait), way)
    arguments = [*(str(parent / file) for file in files), "-k", select, "--rootdir", str(parent), "-c", "/dev/null"]
    arguments += ["--basetemp", str(parent / f"files-{rank}"), "-p", "no:cacheprovider", "--timeout", "240", "-q"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = pytest.main(arguments, plugins=[plugin])
    nothing_selected = select and code == pytest.ExitCode.NO_TESTS_COLLECTED
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not nothing_selected:
        raise RuntimeError(f"pytest ended with {code!r}:\n{printed.getvalue()}")
    return plugin.outcomes


class InStep:
    """A plugin of pytest: fuses and splits models, seeds tests, and compares how they end on all ranks."""

    def __init__(self, store: dist.Store, wait: timedelta, way: Way) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._store, self._wait, self._way, self._number = store, wait, way, 0
        self._reports: list[pytest.TestReport] = []
        self._meshes: dict[int, SequenceMesh] = {}  # by the size of their Ulysses groups
        self._calls = 0
        self._injected: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = {f"{kind}TesterMixin" for kind in ("Model", "Training", "Attention", "Lora")}
        items[:] = [
            item
            for item in items
            if wanted & {base.__name__ for base in _bases(item)} and not item.name.startswith(IN_ANOTHER_PROCESS)
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        # What a test draws beside its own seeds must agree, as in training under our strategies.
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self._reports, self._calls, self._injected = [], 0, set()
        with self._changed():
            result = yield
        self._agree(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        for mesh in self._meshes.values():
            mesh.close()

    def _agree(self, test: str) -> None:
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped]
        result = "failed" if failed else "skipped" if skipped else "passed"
        message = "\n".join(_text(report) for report in failed or skipped)
        self._store.set(f"{self._number}-{dist.get_rank()}", "\n".join((test, result, message)))
        said = [self._said(rank).split("\n", 2) for rank in range(dist.get_world_size())]
        self._number += 1
        if len({name for name, _, _ in said}) > 1:
            raise RuntimeError(f"Ranks ran different tests: {[name for name, _, _ in said]}.")
        results = [result for _, result, _ in said]
        tracebacks = [f"rank {rank}: {text}" for rank, (_, result, text) in enumerate(said) if result == "failed"]
        result = results[0] if len(set(results)) == 1 else "/".join(results)
        self.outcomes[test] = Outcome(
            result, "\n".join(tracebacks) or said[0][2], self._calls, frozenset(self._injected)
        )
        if "failed" in results:  # messages may be under way that nobody takes
            for mesh in self._meshes.values():
                mesh.close(after_failure=True)
            self._meshes.clear()

    def _said(self, rank: int) -> str:
        return self._store.get(f"{self._number}-{rank}").decode()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """Every model of a class with a plan is changed when it has been constructed, however that is done."""
        with ExitStack() as patches:
            for model_class in split_classes():
                patches.enter_context(patch.object(model_class, "__init__", self._changing(model_class)))
            yield

    def _changing(self, model_class: type[nn.Module]) -> Any:
        construct = model_class.__init__

        def count(*_: Any) -> None:  # a function, which copies of the model share
            self._calls += 1

        @functools.wraps(construct)
        def __init__(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            construct(model, *args, **kwargs)
            if type(model) is model_class:
                self._change(model)
                model.register_forward_hook(count)

        return __init__

    def _change(self, model: nn.Module) -> None:
        if "fused" in self._way:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is skipped
                report = inject_fused_kernels(model, "reference")
            assert report.replaced, report
            self._injected |= {f"{block.class_name}: {block.what}" for block in report.replaced}
            self._injected |= {f"{block.class_name} as it is: {block.reason}" for block in report.skipped}
        if "split" in self._way:
            parallelize(model, self._mesh(model))

    def _mesh(self, model: nn.Module) -> SequenceMesh:
        """By Ulysses, or by a ring where the model has fewer heads than there are ranks."""
        ranks = dist.get_world_size()
        ulysses = ranks if fewest_heads(model) >= ranks else 1
        if ulysses not in self._meshes:
            self._meshes[ulysses] = SequenceMesh.create(
                "cpu", ulysses_size=ulysses, ring_size=ranks // ulysses, timeout=self._wait
            )
        return self._meshes[ulysses]


def fewest_heads(model: nn.Module) -> int:
    """Of any attention that a model's plan exchanges."""
    plan = find_plan(model)
    assert plan is not None
    return min(size.heads for size in attention_sizes(model, plan))


def _bases(item: pytest.Item) -> tuple[type, ...]:
    """Of a test's class; diffusers' mixins have other modules in other versions."""
    test_class: type | None = getattr(item, "cls", None)
    return () if test_class is None else test_class.__mro__


def _text(report: pytest.TestReport) -> str:
    """The traceback, or of what is skipped the reason without the place."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext


def split_classes() -> list[type[nn.Module]]:
    """The classes that have a plan, of those that the installed diffusers has."""
    paths = [path.rpartition(".") for path in AllFamilies[Any]("SPLIT_PLANS") if path.startswith("diffusers.")]
    found = [getattr(import_module(module), name, None) for module, _, name in paths if find_spec(module) is not None]
    return [model_class for model_class in found if model_class is not None]
