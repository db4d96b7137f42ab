"""What a pattern means, and which tars are refused."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.tars import TarListing, list_members
from tests.data.clips import clip, expand_shards, write_shard
from tests.data.servers import serving


def _tar(path: Path, *members: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(content))
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_patterns_mean_what_webdataset_users_expect(tmp_path: Path) -> None:
    for name in ("a-000", "a-001", "a-002", "b-000"):
        write_shard(tmp_path / f"{name}.tar", [clip(0)])

    def names(shards: str | list[str]) -> list[str]:
        return [Path(path).stem for path in expand_shards(shards)]

    assert names(f"{tmp_path}/a-{{000..002}}.tar") == ["a-000", "a-001", "a-002"]
    assert names(f"{tmp_path}/{{b-000,a-001}}.tar") == ["b-000", "a-001"]
    assert names(f"{tmp_path}/b-000.tar::{tmp_path}/a-00{{1..2}}.tar") == ["b-000", "a-001", "a-002"]
    assert names([f"{tmp_path}/b-000.tar", f"{tmp_path}/a-000.tar"]) == ["b-000", "a-000"]
    assert names(f"{tmp_path}/*-000.tar") == ["a-000", "b-000"]


def test_two_stars_mean_folders_of_any_depth(tmp_path: Path) -> None:
    found = [str(write_shard(tmp_path / name, [])) for name in ("a/b/c/x.tar", "a/b/x.tar", "a/x.tar", "x.tar")]
    assert expand_shards(f"{tmp_path}/**/*.tar") == found


def test_folders_that_exist_are_no_patterns(tmp_path: Path) -> None:
    found = [str(write_shard(tmp_path / "a [1]" / name, [])) for name in ("b/[c]*/x.tar", "b/x.tar")]
    write_shard(tmp_path / "a 1" / "x.tar", [])
    assert expand_shards(f"{tmp_path}/a [1]/**/*.tar") == found
    assert expand_shards(f"{tmp_path}/a [1]/b/[c]*/*.tar") == found[:1]
    assert expand_shards(f"{tmp_path}/a [12]/*.tar") == [str(tmp_path / "a 1" / "x.tar")]


def test_hidden_files_of_a_folder_are_no_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / ".000001.tar", [clip(1)])  # as a `videoscale pack` leaves it that is killed
    (tmp_path / "._000000.tar").write_bytes(b"of macOS")
    shard = str(write_shard(tmp_path / "000000.tar", [clip(0)]))
    assert expand_shards(str(tmp_path)) == [shard]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "000.tar", [clip(0)])
    with pytest.raises(ShardError, match=r"2 of the 3 .*001\.tar, .*002\.tar"):
        expand_shards(f"{tmp_path}/{{000..002}}.tar")
    with pytest.raises(ShardError, match=r"\['.*/\*\.zip'\] match no file. The current folder is /"):
        expand_shards(f"{tmp_path}/*.zip")
    assert expand_shards(str(tmp_path)) == [f"{tmp_path}/000.tar"]
    (tmp_path / "film.mp4").touch()
    with pytest.raises(ShardError, match=r"film\.mp4.*/\*\.tar'"):
        expand_shards(str(tmp_path))
    with pytest.raises(ShardError, match=r"000\.tar is named twice"):
        expand_shards([f"{tmp_path}/000.tar", f"{tmp_path}/../{tmp_path.name}/000.tar"])


def test_a_star_matches_in_buckets_too(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "x.tar", [clip(0)]).read_bytes()
    for name in ("b-1.tar", "b-0.tar", "b-x.zip", "c/b-2.tar"):
        with fsspec.open(f"memory://stars/{name}", "wb") as file:
            file.write(shard)
    found = ["memory://stars/b-0.tar", "memory://stars/b-1.tar"]
    assert expand_shards("memory://stars/*.tar") == expand_shards("memory://stars/b-[01].tar") == found
    assert expand_shards("memory://stars/*/*.tar") == ["memory://stars/c/b-2.tar"]
    assert expand_shards(f"file://{tmp_path}/?.tar") == [f"file://{tmp_path}/x.tar"]
    for nowhere in ("memory://stars/none/*.tar", "memory://no-bucket/*.tar"):
        with pytest.raises(ShardError, match="match no file"):
            expand_shards(nowhere)
    with pytest.raises(ShardError, match=r"\['.*/typo-\*'\] match no file"):
        expand_shards(["memory://stars/*.tar", "memory://stars/typo-*"])
    data = VideoDataModule({"memory://stars/*.tar": 0.5, f"{tmp_path}/*.tar": 0.5}, tmp_path / "index")
    data.prepare_data()
    data.setup("fit")
    assert data.passes().keys() == {"memory://stars/*.tar", f"{tmp_path}/*.tar"}


def test_a_web_server_that_lists_its_files_is_a_folder_and_its_query_is_no_pattern() -> None:
    page = b"<a href='000.tar'>000</a> <a href='001.tar'>001</a> <a href='notes.txt'>notes</a>"
    with serving({"shards/": page, "shards/000.tar": b"", "shards/001.tar": b""}) as server:
        found = [f"{server.url}/shards/{i:03}.tar" for i in range(2)]
        assert expand_shards(f"{server.url}/shards/*.tar") == found
        assert expand_shards(f"{found[0]}?key=a*b") == [f"{found[0]}?key=a*b"]
        with pytest.raises(ShardError, match=r"none/\*\.tar'\] match no file"):
            expand_shards(f"{server.url}/none/*.tar")


@pytest.mark.parametrize("url", ["pipe:touch {ran}", "pipe:cat {tar} && touch {ran}", " pipe:touch {ran}"])
def test_a_pipe_runs_no_command(tmp_path: Path, url: str) -> None:
    ran, tar = tmp_path / "ran", write_shard(tmp_path / "000.tar", [clip(0)])
    with pytest.raises(ShardError, match=r"would run a command|No shards found"):
        expand_shards(url.format(ran=ran, tar=tar))
    assert not ran.exists()


def test_urls_are_those_of_fsspec(tmp_path: Path) -> None:
    assert expand_shards(["s3://bucket/{000..001}.tar", "https://host/a.tar?token=1"]) == [
        "s3://bucket/000.tar", "s3://bucket/001.tar", "https://host/a.tar?token=1",
    ]  # fmt: skip
    with pytest.raises(ShardError, match=r"file:/tmp/000\.tar'.*'://'"):
        expand_shards("file:/tmp/000.tar")
    with pytest.raises(ShardError, match=r"s3://bucket/000\.tar is named twice"):
        expand_shards(["s3://bucket/000.tar", "s3://bucket/{000..001}.tar"])


def _list(path: Path) -> TarListing:
    with path.open("rb") as file:
        return list_members(file, path.stat().st_size)


def test_members_are_grouped_by_key_and_found_by_byte_range(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1) | {"__key__": "folder.of/clip.v2"}])
    samples = _list(shard).samples
    assert {key: sorted(members) for key, members in samples.items()} == {
        "clip00000": ["json", "latents.npy", "txt"],
        "folder.of/clip.v2": ["json", "latents.npy", "txt"],
    }
    at = samples["clip00000"]["txt"]
    assert shard.read_bytes()[at.offset : at.offset + at.size].decode() == "a caption, n° 0"


def test_folders_bookkeeping_and_names_without_extension_belong_to_no_sample(tmp_path: Path) -> None:
    shard = _tar(
        tmp_path / "x.tar",
        _member("./", tarfile.DIRTYPE), _member("./a.txt"), _member("__meta__/x.json"), _member("README"),
        _member("._a.txt"),
    )  # fmt: skip
    assert list(_list(shard).samples) == ["./a"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (_member("../x.txt"), "points outside the shard"),
        (_member("a/../../x.txt"), "points outside the shard"),
        (_member("/etc/x.txt"), "points outside the shard"),
        (_member("x.txt", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
        (_member("x.txt", tarfile.LNKTYPE, "y.txt"), "is a link"),
        (_member("x.txt", tarfile.FIFOTYPE), "not a plain file"),
        (_member("x.txt", tarfile.CHRTYPE), "not a plain file"),
    ],
)
def test_hostile_members_are_refused_by_name(tmp_path: Path, member: tarfile.TarInfo, message: str) -> None:
    shard = _tar(tmp_path / "x.tar", _member("fine.txt"), member)
    listing = _list(shard)
    assert list(listing.samples) == ["fine"]
    [(name, reason)] = listing.refused
    assert name == member.name and message in reason


def test_a_hostile_member_takes_its_sample_along(tmp_path: Path) -> None:
    shard = _tar(
        tmp_path / "x.tar", _member("a.txt"), _member("a.mp4", tarfile.SYMTYPE, "/etc/passwd"), _member("b.txt")
    )
    assert list(_list(shard).samples) == ["b"]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    shard = _tar(tmp_path / "x.tar", _member("日本 café.txt"), _member("b\udcff.txt"))
    listing = _list(shard)
    assert list(listing.samples) == ["日本 café"]
    assert "not UTF-8" in listing.refused[0].reason


def test_a_name_that_appears_twice_is_refused_with_its_sample(tmp_path: Path) -> None:
    listing = _list(_tar(tmp_path / "x.tar", _member("a.txt"), _member("b.txt"), _member("a.txt")))
    assert list(listing.samples) == ["b"]
    assert listing.refused[0].member == "a.txt" and "appears twice" in listing.refused[0].reason


def test_names_that_differ_in_the_case_of_their_format_are_one(tmp_path: Path) -> None:
    listing = _list(_tar(tmp_path / "x.tar", _member("a.txt"), _member("b.TXT"), _member("a.TXT")))
    assert {key: list(members) for key, members in listing.samples.items()} == {"b": ["txt"]}
    [(member, reason)] = listing.refused
    assert member == "a.TXT" and "'a.txt' appears twice" in reason

    link = _member("a.MP4", tarfile.SYMTYPE, "/etc/passwd")
    listing = _list(_tar(tmp_path / "y.tar", _member("a.TXT"), link, _member("b.TXT")))
    assert list(listing.samples) == ["b"] and [member for member, _ in listing.refused] == ["a.MP4"]


def test_what_is_no_tar_is_said_so(tmp_path: Path) -> None:
    text, empty, packed = tmp_path / "text.tar", tmp_path / "empty.tar", tmp_path / "packed.tar"
    text.write_text("not a tar " * 200)
    empty.touch()
    with tarfile.open(packed, "w:gz") as tar:
        tar.addfile(_member("a.txt"))
    for path in (text, empty, packed):
        samples, [(member, reason)] = _list(path)
        assert not samples and not member and "not an uncompressed tar file" in reason


def test_a_tar_cut_anywhere_keeps_what_is_whole(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "whole.tar", [clip(0), clip(1)]).read_bytes()
    end = len(whole.rstrip(b"\0"))
    cut = tmp_path / "cut.tar"
    for length in [*range(512, end, 200), end]:
        cut.write_bytes(whole[:length])
        samples, refused = _list(cut)
        assert refused[-1].member == "" and "damaged" in refused[-1].reason
        assert all(at.offset + at.size <= length for members in samples.values() for at in members.values())
    assert len(samples) == 2, "only the mark at the end is missing"


def test_a_second_tar_behind_the_end_of_the_first_is_told_of(tmp_path: Path) -> None:
    first, second = (_tar(tmp_path / f"{name}.tar", _member(f"{name}.txt")).read_bytes() for name in "ab")
    joined = tmp_path / "joined.tar"
    joined.write_bytes(first + second)
    samples, [(member, reason)] = _list(joined)
    assert list(samples) == ["a"] and not member
    assert "at byte 512," in reason and f"bytes 10240 to {len(first + second)}" in reason
    assert "tar --concatenate" in reason

    joined.write_bytes(first + bytes(100_000))
    assert _list(joined).refused == (), "records may be longer than 10 KiB"


def test_garbage_after_the_first_member_is_not_the_end(tmp_path: Path) -> None:
    shard = _tar(tmp_path / "x.tar", _member("a.txt"), _member("b.txt"))
    content = bytearray(shard.read_bytes())
    content[512:1024] = b"x" * 512
    shard.write_bytes(content)
    samples, [(_, reason)] = _list(shard)
    assert list(samples) == ["a"] and "ends early or is damaged at byte 512 of" in reason


def test_a_size_that_leads_back_is_no_endless_loop(tmp_path: Path) -> None:
    shard = _tar(tmp_path / "x.tar", _member("a.txt"))
    header = bytearray(shard.read_bytes()[:512])
    header[124:136] = (-512).to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shard.write_bytes(bytes(header) + bytes(1024))
    samples, [(_, reason)] = _list(shard)
    assert not samples and ("'a.txt' has the size -512" in reason or "invalid offset" in reason)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_tar_is_read_or_refused_and_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(write_shard(tmp_path / "000.tar", [clip(0, (4, 1, 4, 4)), clip(1, (4, 1, 4, 4))]).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "000.tar").write_bytes(content)
    samples, refused = _list(tmp_path / "000.tar")
    assert all(at.offset + at.size <= len(content) for members in samples.values() for at in members.values())
    assert all(reason for _, reason in refused)
