"""The GGUF reader on small files written here: contents, splits, damage of every kind."""

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.errors import GGUFError
from jaxllm.gguf import iter_row_chunks, open_gguf, read_rows, supported

TOKENS = ["<s>", "a", "\u2581b", "日本", ""]


def write_small(path: Path, **options: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_name("small")
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_array("llama.flags", [True, False])
    writer.add_bool("llama.flag", True)
    writer.add_tensor("a", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("b", np.arange(8, dtype=np.float16))
    blocks = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("c", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("gguf") / "small.gguf")


def kv(key: str, kind: int, payload: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + payload


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def raw_file(
    path: Path,
    kvs: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> Path:
    n_kv = len(kvs) if n_kv is None else n_kv
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    head = struct.pack("<4sIQQ", b"GGUF", version, n_tensors, n_kv)
    body = head + b"".join(kvs) + b"".join(tensors)
    path.write_bytes(body + bytes(-len(body) % 32) + bytes(256))
    return path


def test_contents(small: Path) -> None:
    file = open_gguf(str(small))
    assert file.path == small and file.version == 3
    assert file.architecture == "llama"
    assert file.nbytes == small.stat().st_size
    assert file.metadata["general.name"] == "small"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == pytest.approx(10000.5)
    assert file.metadata["llama.flag"] is True
    assert file.metadata["llama.flags"].tolist() == [True, False]
    assert file.metadata["tokenizer.ggml.tokens"] == TOKENS
    types = file.metadata["tokenizer.ggml.token_type"]
    assert types.dtype == np.int32 and types.tolist() == [3, 1, 1, 1, 1]
    assert list(file.tensors) == ["a", "b", "c"]
    info = file.tensors["a"]
    assert (info.shape, info.rows, info.cols, info.row_bytes) == ((2, 3, 4), 6, 4, 16)
    assert info.nbytes == 96 and info.type is gguf.GGMLQuantizationType.F32
    assert file.tensors["b"].rows == 1


def test_agrees_with_the_gguf_package(small: Path) -> None:
    file = open_gguf(small)
    for theirs in gguf.GGUFReader(small).tensors:
        ours = file.tensors[theirs.name]
        assert ours.offset == theirs.data_offset and ours.nbytes == theirs.n_bytes
        assert read_rows(ours, 0, ours.rows).tobytes() == theirs.data.tobytes()


def test_read_rows_reads_only_those_rows(small: Path) -> None:
    info = open_gguf(small).tensors["a"]
    raw = read_rows(info, 2, 4)
    assert raw.shape == (2, 16)
    assert raw.view("<f4").tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert read_rows(info, 3, 3).shape == (0, 16)
    with pytest.raises(ValueError, match="outside the 6 rows"):
        read_rows(info, 5, 7)


def test_string_arrays_are_lossless(tmp_path: Path) -> None:
    texts = [b"ok", b"\xff\xfe", b""]
    payload = struct.pack("<IQ", 8, len(texts))
    payload += b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    file = open_gguf(raw_file(tmp_path / "x.gguf", (kv("tokens", 9, payload),)))
    decoded = file.metadata["tokens"]
    assert [text.encode("utf-8", "surrogateescape") for text in decoded] == texts


def test_long_string_arrays_cross_the_read_ahead(tmp_path: Path) -> None:
    texts = ["x" * (i % 50) for i in range(100_000)]
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", "llama")
    writer.add_token_list(texts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_gguf(tmp_path / "long.gguf").metadata["tokenizer.ggml.tokens"] == texts


def test_version_2_and_scalar_tensor(tmp_path: Path) -> None:
    file = open_gguf(raw_file(tmp_path / "x.gguf", (), (tensor("s", []),), version=2))
    assert file.version == 2 and file.tensors["s"].shape == (1,)


def test_architecture_is_required_of_models(tmp_path: Path) -> None:
    file = open_gguf(raw_file(tmp_path / "x.gguf"))
    with pytest.raises(GGUFError, match="general.architecture"):
        _ = file.architecture


class TestSplit:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write_small(tmp_path / "model.gguf", split_max_tensors=1)
        return sorted(tmp_path.glob("model-*.gguf"))

    def test_any_part_opens_all(self, parts: list[Path], small: Path) -> None:
        whole = open_gguf(small)
        assert len(parts) == 3
        for part in parts:
            file = open_gguf(part)
            assert file.files == tuple(parts)
            assert file.nbytes == sum(each.stat().st_size for each in parts)
            assert file.architecture == "llama"
            assert list(file.tensors) == ["a", "b", "c"]
            for name, info in file.tensors.items():
                raw = read_rows(info, 0, info.rows)
                other = whole.tensors[name]
                assert raw.tobytes() == read_rows(other, 0, other.rows).tobytes()

    def test_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(GGUFError, match=r"model-00002-of-00003\.gguf.* is missing"):
            open_gguf(parts[0])

    def test_renamed_part(self, parts: list[Path]) -> None:
        lone = parts[0].rename(parts[0].with_name("lone.gguf"))
        with pytest.raises(GGUFError, match="must keep its name"):
            open_gguf(lone)

    def test_swapped_parts(self, parts: list[Path]) -> None:
        contents = parts[1].read_bytes()
        parts[1].write_bytes(parts[2].read_bytes())
        parts[2].write_bytes(contents)
        with pytest.raises(GGUFError, match="disagree"):
            open_gguf(parts[0])


class TestDamage:
    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError, match="there is no file"):
            open_gguf(tmp_path / "none.gguf")

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError, match="is a directory"):
            open_gguf(tmp_path)

    def test_device(self) -> None:
        with pytest.raises(GGUFError, match="not a regular file"):
            open_gguf("/dev/zero")

    def test_not_a_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"PK\x03\x04 zip")
        with pytest.raises(GGUFError, match="not a GGUF file: it starts with b'PK"):
            open_gguf(tmp_path / "x")

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"")
        with pytest.raises(GGUFError, match="truncated in the header: 4 bytes are missing"):
            open_gguf(tmp_path / "x")

    @pytest.mark.parametrize(
        ("version", "message"), [(1, "GGUF version 1"), (9, "version 9"), (3 << 24, "big-endian")]
    )
    def test_version(self, tmp_path: Path, version: int, message: str) -> None:
        with pytest.raises(GGUFError, match=message):
            open_gguf(raw_file(tmp_path / "x.gguf", version=version))

    def test_truncated_data_says_how_much(self, small: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        info = open_gguf(small).tensors["c"]
        cut.write_bytes(small.read_bytes()[: info.offset + info.nbytes - 7])
        with pytest.raises(GGUFError, match="data of tensor 'c': 7 bytes are missing"):
            open_gguf(cut)

    def test_truncated_while_open(self, small: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(small.read_bytes())
        info = open_gguf(copy).tensors["c"]
        copy.write_bytes(b"")
        with pytest.raises(GGUFError, match="too short for tensor 'c'"):
            read_rows(info, 0, info.rows)

    def test_every_truncation(self, small: Path, tmp_path: Path) -> None:
        data = small.read_bytes()
        end = max(info.offset + info.nbytes for info in open_gguf(small).tensors.values())
        cut = tmp_path / "cut.gguf"
        for length in range(end):
            cut.write_bytes(data[:length])
            with pytest.raises(GGUFError):
                open_gguf(cut)

    def test_unknown_tensor_type(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path / "x.gguf", (), (tensor("w", [4], kind=999),))
        with pytest.raises(GGUFError, match="tensor 'w' in type number 999"):
            open_gguf(path)

    def test_long_names_are_cut(self, tmp_path: Path) -> None:
        name, path = "w" * 10_000, tmp_path / "x.gguf"
        for kvs, tensors in (
            ((), (tensor(name, [4], kind=999),)),
            ((), (tensor(name, [4]),) * 2),
            ((kv(name, 13, bytes(8)),), ()),
            ((kv(name, 4, bytes(4)),) * 2, ()),
        ):
            with pytest.raises(GGUFError) as found:
                open_gguf(raw_file(path, kvs, tensors))
            assert f"'{'w' * 56}..." in str(found.value)
            assert len(str(found.value)) < 250 + len(str(path))

    def test_duplicate_tensor(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path / "x.gguf", (), (tensor("w", [4]), tensor("w", [4])))
        with pytest.raises(GGUFError, match="tensor 'w' twice"):
            open_gguf(path)

    def test_duplicate_key(self, tmp_path: Path) -> None:
        entry = kv("k", 4, bytes(4))
        with pytest.raises(GGUFError, match="metadata 'k' twice"):
            open_gguf(raw_file(tmp_path / "x.gguf", (entry, entry)))

    @pytest.mark.parametrize(
        ("dims", "kind", "message"),
        [
            ([0, 4], 0, "empty shape"),
            ([1] * 5, 0, "5 dimensions"),
            ([33], 8, "not a multiple of Q8_0's block of 32"),
            ([1 << 62, 1 << 62], 0, "bytes are missing"),
        ],
    )
    def test_shapes(self, tmp_path: Path, dims: list[int], kind: int, message: str) -> None:
        with pytest.raises(GGUFError, match=message):
            open_gguf(raw_file(tmp_path / "x.gguf", (), (tensor("w", dims, kind),)))

    def test_misaligned(self, tmp_path: Path) -> None:
        with pytest.raises(GGUFError, match="multiple of the alignment 32"):
            open_gguf(raw_file(tmp_path / "x.gguf", (), (tensor("w", [4], offset=4),)))

    def test_overlap(self, tmp_path: Path) -> None:
        tensors = (tensor("v", [16], offset=32), tensor("w", [9]))
        path = raw_file(tmp_path / "x.gguf", (), tensors)
        path.write_bytes(path.read_bytes() + bytes(256))
        with pytest.raises(GGUFError, match="'w' and 'v' overlap"):
            open_gguf(path)

    @pytest.mark.parametrize(
        ("kind", "payload", "message"),
        [
            (13, bytes(8), "unknown value type 13"),
            (9, struct.pack("<IQ", 9, 1), "nested array"),
            (9, struct.pack("<IQ", 99, 1), "unknown element type 99"),
            (9, struct.pack("<IQ", 8, 1 << 60), "bytes are missing"),
            (9, struct.pack("<IQ", 6, 1 << 60), "bytes are missing"),
            (8, struct.pack("<Q", 1 << 60), "bytes are missing"),
        ],
    )
    def test_values(self, tmp_path: Path, kind: int, payload: bytes, message: str) -> None:
        with pytest.raises(GGUFError, match=message):
            open_gguf(raw_file(tmp_path / "x.gguf", (kv("k", kind, payload),)))

    def test_alignment(self, tmp_path: Path) -> None:
        entry = kv("general.alignment", 4, struct.pack("<I", 12))
        with pytest.raises(GGUFError, match="alignment 12"):
            open_gguf(raw_file(tmp_path / "x.gguf", (entry,)))

    @pytest.mark.parametrize(("n_kv", "n_tensors"), [(1 << 60, None), (None, 1 << 60)])
    def test_absurd_counts_allocate_nothing(
        self, tmp_path: Path, n_kv: int | None, n_tensors: int | None
    ) -> None:
        path = raw_file(tmp_path / "x.gguf", n_kv=n_kv, n_tensors=n_tensors)
        tracemalloc.start()
        with pytest.raises(GGUFError, match="claims 1152921504606846976"):
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20

    @settings(
        max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(data=st.data())
    def test_fuzz(self, small: Path, tmp_path: Path, data: st.DataObject) -> None:
        damaged = bytearray(small.read_bytes())
        position = st.integers(0, len(damaged) - 1)
        for at in data.draw(st.lists(position, max_size=6)):
            damaged[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del damaged[data.draw(position) :]
        path = tmp_path / "fuzz.gguf"
        path.write_bytes(damaged)
        try:
            file = open_gguf(path)
            for info in file.tensors.values():
                if supported(info.type):
                    rows = sum(values.shape[0] for _, values in iter_row_chunks(info))
                    assert rows == info.rows
        except GGUFError as error:
            assert str(error).endswith(".") and "\n" not in str(error)
