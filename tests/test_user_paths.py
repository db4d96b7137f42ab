"""Which names are URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_videoscale.user_paths import is_url, on_disk


@pytest.mark.parametrize("path", ["s3://bucket/a", "s3:/bucket/a", "gs://bucket", "memory://a", "file:///a"])
def test_urls_are_no_folders(path: str) -> None:
    assert is_url(path)
    assert is_url(Path(path))


@pytest.mark.parametrize("path", ["/a/b", "a/b:c", "C:/a", "", "."])
def test_folders_are_no_urls(path: str) -> None:
    assert not is_url(path)


def test_what_must_be_on_a_disk_is_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/homes/me")
    assert on_disk("~/a/b.json", "file") == Path("/homes/me/a/b.json")
    with pytest.raises(ValueError, match="file='s3://bucket/a'"):
        on_disk("s3://bucket/a", "file")
