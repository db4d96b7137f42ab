"""Blocks are recognised by what they compute: not by how their file is written, and not by their name alone."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_wan

from lightning_videoscale.injection import inject_fused_kernels, source_hash
from lightning_videoscale.injection.methods import difference
from tests.models import tiny_wan
from tests.models.test_wan import prepared, run, text_to_video

SOURCE = Path(transformer_wan.__file__).read_text(encoding="utf-8")
GATE = "hidden_states = (hidden_states.float() + attn_output * gate_msa).type_as(hidden_states)"


def wan_from(source: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny Wan of another release of diffusers, whose file is ``source``."""
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(transformer_wan.__name__, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, transformer_wan.__name__, module)
    spec.loader.exec_module(module)
    original = tiny_wan()
    model = module.WanTransformer3DModel(**original.config)
    model.load_state_dict(original.state_dict())
    return model


class Rewritten(ast.NodeTransformer):
    """Other docstrings, and no annotations but for one at each first assignment."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = ast.Constant("anything")
        for argument in node.args.args:
            argument.annotation = None
        first = next((i for i, statement in enumerate(node.body) if isinstance(statement, ast.Assign)), None)
        if first is not None and isinstance(node.body[first].targets[0], ast.Name):
            assignment = node.body[first]
            node.body[first] = ast.AnnAssign(assignment.targets[0], ast.Name("object"), assignment.value, simple=1)
        node.body.insert(0, ast.Expr(ast.Constant("A docstring of its own.")))
        return node


def test_another_way_of_writing_the_same_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ast.unparse(ast.fix_missing_locations(Rewritten().visit(ast.parse(SOURCE))))  # which drops all comments
    rewritten = re.sub(r"^( +)(query, key, value = )", r"\1# queries first\n\1\2", source, flags=re.MULTILINE)
    assert "# queries first" in rewritten and GATE in rewritten
    model = wan_from(rewritten, tmp_path / "transformer_wan.py", monkeypatch)
    with prepared(text_to_video, torch.float32) as (original, inputs):
        expected, _ = run(original, inputs)
        report = inject_fused_kernels(model)
        output, _ = run(model, inputs)
    assert len(report.replaced) == 9 and not report.skipped
    assert torch.equal(output, expected)


def test_one_other_operator_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SOURCE.count(GATE) == 1
    changed = SOURCE.replace(GATE, GATE.replace("+", "-"))
    line = changed[: changed.index(GATE.replace("+", "-"))].count("\n") + 1
    model = wan_from(changed, tmp_path / "transformer_wan.py", monkeypatch)
    with prepared(text_to_video, torch.float32) as (_, inputs):
        expected, _ = run(model, inputs)
        with pytest.warns(UserWarning, match="skipped 2 WanTransformerBlock"):
            report = inject_fused_kernels(model)
        output, _ = run(model, inputs)
    assert torch.equal(output, expected)
    reason = report.skipped[0].reason
    assert f"differs first in line {line}, `{GATE.replace('+', '-')}`" in reason
    assert "diffusers" in reason and "0.37 to 0.42.1" in reason
    assert {replaced.class_name for replaced in report.replaced} == {"WanAttention", "FeedForward"}


def test_another_operator_inside_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = SOURCE.replace("x1 * cos - x2 * sin", "x1 * cos + x2 * sin")
    model = wan_from(changed, tmp_path / "transformer_wan.py", monkeypatch)
    with pytest.warns(UserWarning, match=r"4 WanAttention .* the __call__ of its processor .*`if rotary_emb is not"):
        inject_fused_kernels(model)


FIRST = """
class Scaled:
    def forward(self, x: int, scale: float = 1.0) -> float:
        y = x * scale
        return y + 1
"""
IN_OTHER_WORDS = """
class Scaled:
    def forward(self, x, scale=1.0):
        '''Multiplies.'''
        z: int
        y: float = (
            x  # the factor
            * scale
        )
        return y + 1
"""


def scaled(source: str, file: Path) -> Any:
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("scaled", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Scaled


@pytest.mark.parametrize(
    ("source", "where"),
    [
        (IN_OTHER_WORDS, None),
        (FIRST.replace("1.0", "2.0"), "line 3, `def forward(self, x, scale=2.0):`"),
        (FIRST.replace("return", "y = y * y\n        return"), "line 5, `y = y * y`"),
        (FIRST.replace("        return y + 1\n", ""), "ends after line 4"),
    ],
)
def test_where_versions_differ(source: str, where: str | None, tmp_path: Path) -> None:
    first = scaled(FIRST, tmp_path / "first.py")
    found = difference(scaled(source, tmp_path / "other.py"), "forward", {str(source_hash(first.forward)): "release 1"})
    assert found is None if where is None else "(release 1)" in str(found) and where in str(found)
