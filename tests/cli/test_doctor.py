"""`videoscale doctor`."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from lightning_videoscale.cli import doctor, main
from lightning_videoscale.cli.doctor import examine
from lightning_videoscale.compat.names import installed_version


def findings(subject: str) -> list[tuple[str, str, str]]:
    return [(f.status, f.detail, f.remedy) for f in examine() if f.subject == subject]


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Lets packages have other versions than they do."""
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: versions[name] if name in versions else installed_version(name)
    )


def test_the_versions_in_use_are_told() -> None:
    assert findings("lightning")[0] == ("ok", metadata.version("lightning"), "")
    assert metadata.version("torch") in findings("torch")[0][1]


@pytest.mark.parametrize("bad", ["2.6.2", "2.6.3"])
def test_withdrawn_releases_of_lightning_are_bad(monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    pretend(monkeypatch, lightning=bad)
    (_, (status, detail, remedy)) = findings("lightning")
    assert status == "bad"
    assert "GHSA-w37p-236h-pfx3" in detail
    assert "lightning>=2.6.6" in remedy


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, webdataset=None, deepspeed=None)
    assert findings("webdataset") == [("bad", "not installed", "pip install webdataset")]
    ((status, detail, remedy),) = findings("deepspeed")
    assert status == "missing" and "ulysses_deepspeed_stage_1" in detail
    assert remedy == "pip install 'lightning-videoscale[zero]'"
    assert main(["doctor"]) == 1


@pytest.mark.parametrize(("release", "bad"), [("2.11.0+cu130", True), ("2.13.0+cu130", False)])
def test_torch_with_the_mix_order_reduction_is_bad_on_gpus(
    monkeypatch: pytest.MonkeyPatch, release: str, bad: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.delenv("TORCHINDUCTOR_MIX_ORDER_REDUCTION", raising=False)
    found = findings("torch.compile")
    assert bool(found) is bad
    if bad:
        assert found[0][2] == "export TORCHINDUCTOR_MIX_ORDER_REDUCTION=0"
        monkeypatch.setenv("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
        assert findings("torch.compile") == []


def test_gpus_that_do_not_reach_each_other_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "Some GPU", 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    monkeypatch.setattr(doctor, "what_lacks", lambda transport, device: "an old driver" if device.index else "")
    assert findings("gpu 1") == [("ok", "Some GPU, 80 GiB, sm_90", "")]
    kernels = findings("attention kernels")
    assert [(status, remedy) for status, _, remedy in kernels] == 2 * [
        ("slow", "pip install 'lightning-videoscale[flash]'")
    ]
    assert kernels[0][1].startswith("gpu 0: ") and "flash, efficient, math; without FlashAttention 4" in kernels[0][1]
    ((status, detail, remedy),) = findings("peer access")
    assert status == "slow"
    assert "[(1, 0)]" in detail
    assert "sequence-parallel group" in remedy
    assert [(status, remedy) for status, _, remedy in findings("symmetric memory")] == [
        ("ok", ""),
        ("missing", "use transport='collective'"),
    ]


@pytest.mark.parametrize(("link", "status"), [("NV18", "ok"), ("SYS", "slow")])
def test_links_slower_than_nvlink_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, link: str, status: str
) -> None:
    head = r"\t\033[4mGPU0\tGPU1\tCPU Affinity\033[0m\n"
    matrix = head + rf"GPU0\t X \t{link}\t0-31\nGPU1\t{link}\t X \t0-31\n"
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{matrix}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    found = [(finding.status, finding.detail) for finding in doctor._links(2) if finding.subject == "links"]
    assert found == [(status, f"between GPUs: {link} (nvidia-smi topo -m)")]


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {"subject", "status", "detail", "remedy"} == set(report["findings"][0])


def test_every_optional_package_is_in_the_extra_that_is_named() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, (_, extra) in doctor._OPTIONAL.items():
        names = {Requirement(line).name for line in project["optional-dependencies"][extra]}
        assert name in names, f"{name} is not in the extra {extra}"
