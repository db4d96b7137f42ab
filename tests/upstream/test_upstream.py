"""diffusers' own tests on ranks, where `--diffusers=FOLDER` says where they are; and how their results are judged."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.distributed.pool import ProcessPool
from tests.upstream.checkout import FAMILIES, FUSED, files_of, has_tests, lacking, linked
from tests.upstream.configs import errors_of_configs
from tests.upstream.in_step import Outcome, Way
from tests.upstream.verdict import run_family, wrong


@pytest.fixture
def diffusers(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--diffusers")
    if folder is None:
        pytest.skip("needs a checkout of diffusers: --diffusers=FOLDER, as tests/upstream/README.md says")
    return Path(folder)


@pytest.fixture
def checkout(diffusers: Path, family: str) -> Path:
    if not has_tests(diffusers, family):
        pytest.skip("newer than this checkout")
    return diffusers


def families(names: Collection[str]) -> list[Any]:
    """Those whose packages are missing are skipped."""
    reasons = {name: f"needs {lacking(name)}" for name in names if lacking(name)}
    return [
        pytest.param(name, marks=pytest.mark.skip(reason=reasons[name])) if name in reasons else name for name in names
    ]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", families(FAMILIES))
def test_a_family_passes_its_own_tests(checkout: Path, family: str) -> None:
    verdict = run_family(checkout, family)
    assert verdict.wrong == {}
    assert sum(outcome.calls for outcome in verdict.outcomes.values()) > 10, verdict.summary


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", ["fused", "fused and split"])
@pytest.mark.parametrize("family", families(FUSED))
def test_a_family_passes_its_own_tests_with_fused_kernels(checkout: Path, family: str, way: Way) -> None:
    verdict = run_family(checkout, family, way=way)
    assert verdict.wrong == {}
    assert sum(outcome.calls for outcome in verdict.outcomes.values()) > 10, verdict.summary


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", families(FAMILIES))
def test_its_configurations_are_exact(checkout: Path, family: str) -> None:
    pool = ProcessPool(2, timeout=1800.0)
    try:
        with linked(checkout) as parent:
            of_ranks = pool.run(errors_of_configs, parent, files_of(family, parent))
    finally:
        pool.stop()
    for of_rank in of_ranks:
        assert len(of_rank) >= len(FAMILIES[family])
        for of_config in of_rank.values():
            for case, found in of_config.items():
                bound = 1e-5 if case.float32 else 1e-10
                assert found["norm"] > 1e-3, case
                assert {name: e for name, e in found.items() if name != "norm" and not e <= bound} == {}, case


CHECKOUT = {
    "__init__.py": "",
    "models/__init__.py": "",
    "models/testing_utils/__init__.py": """
        class ModelTesterMixin: ...
        class TrainingTesterMixin: ...
        class AttentionTesterMixin: ...
        class LoraTesterMixin: ...
    """,
    "models/transformers/__init__.py": "",
    "models/transformers/test_models_transformer_wan.py": """
        import pytest
        import torch
        import torch.distributed as dist
        from diffusers import WanTransformer3DModel
        from ..testing_utils import ModelTesterMixin

        SIZES = dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8,
                     freq_dim=8, ffn_dim=16, num_layers=1, rope_max_seq_len=8)

        def call(model):
            return model(torch.randn(1, 4, 1, 4, 6), torch.tensor([5]), torch.randn(1, 3, 8), return_dict=False)[0]

        class TestWan(ModelTesterMixin):
            def test_of_new(self):
                assert call(WanTransformer3DModel(**SIZES)).shape == (1, 4, 1, 4, 6)

            def test_of_one_rank(self):
                assert dist.get_rank() == 0
                call(WanTransformer3DModel(**SIZES))

            def test_of_saved(self, tmp_path):
                model = WanTransformer3DModel(**SIZES)
                model.save_pretrained(tmp_path)
                again = WanTransformer3DModel.from_pretrained(tmp_path)
                config = WanTransformer3DModel.from_config(model.config)
                torch.manual_seed(0)
                expected = call(model)
                torch.manual_seed(0)
                torch.testing.assert_close(call(again), expected)
                call(config)

            @pytest.mark.skip("no reason")
            def test_skipped(self): ...

        class TestOther:
            def test_not_asked_for(self):
                raise AssertionError
    """,
}


def test_ranks_stay_in_step_past_a_failure(tmp_path: Path) -> None:
    for name, text in CHECKOUT.items():
        file = tmp_path / "tests" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    verdict = run_family(tmp_path, "wan", "test_", wait=2.0)
    found = {test.rpartition("::")[2]: (outcome.result, outcome.calls) for test, outcome in verdict.outcomes.items()}
    # The run before a new model's first call, to see whether its attention exchanges, is none that a hook has counted.
    assert found == {
        "test_of_new": ("passed", 1),
        "test_of_one_rank": ("failed", 0),
        "test_of_saved": ("passed", 3),
        "test_skipped": ("skipped", 0),
    }
    ((name, said),) = verdict.wrong.items()
    assert name == "test_models_transformer_wan.py::TestWan::test_of_one_rank"
    assert re.search("rank 0:.*Timed out|rank 0:.*timeout", said, re.DOTALL)
    assert re.search("rank 1:.*assert 1 == 0", said, re.DOTALL)


def test_what_is_known_to_fail_must_fail() -> None:
    outcomes = {name: Outcome(name, "said", 0) for name in ("passed", "failed", "skipped")}
    outcomes["on one"] = Outcome("passed/failed", "said", 0)
    assert set(wrong(outcomes, {})) == {"failed", "on one"}
    known = dict.fromkeys([*outcomes, "gone"], "why")
    assert set(wrong(outcomes, known)) == {"passed", "skipped", "gone"}
    assert set(wrong(outcomes, known, some=True)) == {"passed", "skipped"}


def test_a_folder_without_tests_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path} has no folder tests/models")), linked(tmp_path):
        pass
