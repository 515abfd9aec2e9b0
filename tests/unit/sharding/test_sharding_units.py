"""Bytes as text, read and written."""

import pytest

from sharding import PlanOptions, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        (".5k", 512),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1TiB", 1 << 40),
        (" 7 ", 7),
    ],
)
def test_bytes_with_units(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1", "1e9", "1,5G", "1P", "1iB", "inf", "1 G x", "٣"])
def test_other_text_is_no_bytes(text: str):
    with pytest.raises(ValueError, match="no number of bytes"):
        parse_bytes(text)


def test_what_is_shown_can_be_given():
    for count in (0, 1023, 3 << 20, 5 << 30):
        assert parse_bytes(format_bytes(count)) == count


def test_options_of_bytes_take_units():
    assert PlanOptions(kv="host", kv_device_bytes="1.5G").kv_device_bytes == 3 << 29
