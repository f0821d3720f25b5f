"""Payload files: records are read as written, and one that is not whole is named with its file and offset."""

import errno
import os

import pytest

from molt.train.errors import PayloadDamagedError
from molt.train.pool import payloads
from molt.train.pool.payloads import HEAD, PayloadReader, PayloadWriter, payload_file


@pytest.fixture
def writer(tmp_path):
    writer = PayloadWriter(tmp_path / "payloads")
    yield writer
    writer.close()


@pytest.fixture
def reader(tmp_path):
    reader = PayloadReader(tmp_path / "payloads")
    yield reader
    reader.close()


def test_records_are_read_in_any_order_while_more_are_written(writer, reader):
    first = writer.append(b"one")
    assert reader.read(first) == b"one"
    second, third = writer.append(b""), writer.append(b"three" * 100_000)
    assert reader.read(third) == b"three" * 100_000
    assert (reader.read(second), reader.read(first)) == (b"", b"one")


def test_a_full_file_is_followed_by_the_next(writer, reader, monkeypatch):
    monkeypatch.setattr(payloads, "FILE_BYTES", 50)
    places = [writer.append(bytes([i]) * 20) for i in range(5)]
    assert [place.file for place in places] == [1, 1, 2, 2, 3]
    assert [reader.read(place) for place in reversed(places)] == [bytes([i]) * 20 for i in reversed(range(5))]


def test_the_next_writer_passes_over_what_a_dead_one_left(tmp_path, writer, reader):
    place = writer.append(b"kept")
    with payload_file(tmp_path / "payloads", 1).open("ab") as file:
        file.write(HEAD.pack(b"MOLT", 1, 1000) + b"torn")
    second = PayloadWriter(tmp_path / "payloads")
    after = second.append(b"after")
    second.close()
    assert after.offset > place.offset + HEAD.size + 8
    assert (reader.read(place), reader.read(after)) == (b"kept", b"after")


def test_what_is_undone_gives_its_space_back(tmp_path, writer, reader):
    kept = writer.append(b"kept")
    end = writer.end
    writer.append(b"undone" * 1000)
    writer.undo(end)
    assert payload_file(tmp_path / "payloads", 1).stat().st_size == HEAD.size + 4
    after = writer.append(b"after")
    assert (reader.read(kept), reader.read(after)) == (b"kept", b"after")


def test_what_is_undone_in_a_former_file_is_left_there(writer, reader, monkeypatch):
    monkeypatch.setattr(payloads, "FILE_BYTES", 50)
    end = writer.end
    for _ in range(3):
        writer.append(b"x" * 40)
    writer.undo(end)
    assert reader.read(writer.append(b"after")) == b"after"


@pytest.mark.parametrize("written", [0, 3, 20])
def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path, writer, reader, monkeypatch, written):
    kept = writer.append(b"kept")

    write = os.pwrite

    def part(file, parts, offset):
        write(file, b"".join(parts)[:written], offset)
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    def nothing(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", part)
        patch.setattr(os, "pwrite", nothing)
        with pytest.raises(OSError, match="No space"):
            writer.append(b"lost" * 100)
    assert payload_file(tmp_path / "payloads", 1).stat().st_size == HEAD.size + 4
    assert (reader.read(kept), reader.read(writer.append(b"after"))) == (b"kept", b"after")


def test_a_short_write_is_gone_on_with(writer, reader, monkeypatch):
    whole = os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda file, parts, offset: whole(file, [b"".join(parts)[:7]], offset))
        place = writer.append(b"a record in two parts")
    assert reader.read(place) == b"a record in two parts"


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data, place: data[: place.offset + 20], "it ends after 20 of 21 bytes"),
        (lambda data, place: data[: place.offset], "it ends after 0 of 21 bytes"),
        (lambda data, place: data[: place.offset] + b"\0" * 21, "its head is another one"),
        (lambda data, place: data[:-1] + b"?", "its checksum is wrong"),
    ],
    ids=["cut", "cut_before", "zeros", "flipped"],
)
def test_a_damaged_record_is_named_with_its_file_and_offset(tmp_path, writer, reader, damage, found):
    kept, place = writer.append(b"kept"), writer.append(b"later")
    path = payload_file(tmp_path / "payloads", 1)
    path.write_bytes(damage(path.read_bytes(), place))
    with pytest.raises(PayloadDamagedError) as error:
        reader.read(place)
    assert str(error.value) == f"payload file {str(path)!r}: the record at offset 20 is damaged: {found}"
    assert reader.read(kept) == b"kept"


def test_a_file_that_is_gone_is_damage(tmp_path, writer, reader):
    place = writer.append(b"x")
    payload_file(tmp_path / "payloads", 1).unlink()
    with pytest.raises(PayloadDamagedError, match=r"000001\.bin': the record at offset 0 is damaged: No such file"):
        reader.read(place)


def test_only_what_was_appended_is_synced(writer, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    writer.sync()
    writer.sync()
    assert len(synced) == 1, "once for what an earlier writer may have left"
    writer.append(b"x")
    end = writer.end
    writer.sync()
    assert len(synced) == 2
    writer.append(b"y")
    writer.undo(end)
    writer.append(b"z")
    writer.sync()
    assert len(synced) == 3, "of the same length as before, but other bytes"
