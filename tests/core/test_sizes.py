from __future__ import annotations

import pytest

from strata.core.errors import BadInput
from strata.core.sizes import at_least_one, parse_bytes, parse_ratio, parse_shape, show_bytes, written_bytes


@pytest.mark.parametrize(
    "text, size",
    [
        ("24 MiB", 25165824), ("24MiB", 25165824), ("24 mib", 25165824), ("24MB", 24_000_000), ("1.5 GiB", 1610612736),
        ("24000000", 24_000_000), (24_000_000, 24_000_000), ("512 KiB", 524288), ("7 bytes", 7), ("0.5kB", 500),
    ],
)  # fmt: skip
def test_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["6.5MiB", "48MiB", "63.1MiB", "24GiB", "300KiB", "5MB", "1kB", "999B", "2621441B"])
def test_bytes_are_written_as_they_are_read(text: str) -> None:
    assert written_bytes(parse_bytes(text)) == text


def test_what_is_written_means_exactly_as_many() -> None:
    assert all(parse_bytes(written_bytes(size)) == size for size in range(1, 2**22, 1009))


@pytest.mark.parametrize("text", ["12 bananas", "", "MiB", "24 MiB please", "nan", "inf", "1e400", True, "24,000"])
def test_not_bytes(text: str) -> None:
    with pytest.raises(BadInput, match="a budget is a number of bytes such as"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "-1", "-5 MiB", 0, -3, "0.4"])
def test_too_few_bytes(text: str | int) -> None:
    with pytest.raises(BadInput, match="at least one byte"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9" * 400, 10**400, "1" * 300, "9000000TiB", 2**63])
def test_too_many_bytes(text: str | int) -> None:
    with pytest.raises(BadInput, match="below 2\\^63 bytes") as refused:
        parse_bytes(text)
    assert len(str(refused.value)) < 120


@pytest.mark.parametrize("value", [0, 2, -0.5, 1.0001, "nan", "half", "0"])
def test_not_a_ratio(value: str | float) -> None:
    with pytest.raises(BadInput, match="above 0 and at most 1"):
        parse_ratio(value)


def test_ratio() -> None:
    assert parse_ratio("0.25") == 0.25 and parse_ratio(1) == 1.0


@pytest.mark.parametrize("value", ["3x32x", "3 32 32", "0x32x32", "3x-2x4", "", "axbxc", ()])
def test_not_a_shape(value: str) -> None:
    with pytest.raises(BadInput, match="such as 3x32x32"):
        parse_shape(value)


def test_shape() -> None:
    assert parse_shape("3x32x32") == parse_shape((3, 32, 32)) == parse_shape("3X32X32") == (3, 32, 32)
    assert parse_shape("128") == (128,)


def test_at_least_one() -> None:
    assert at_least_one("5", "--rounds") == 5
    for value in ("0", "-1", "1.5", "many", 0):
        with pytest.raises(BadInput, match=f"--rounds must be a whole number of at least 1, not {value}"):
            at_least_one(value, "--rounds")


def test_show() -> None:
    assert [show_bytes(n) for n in (999, 25165824, 107045840, 2**31)] == ["999 B", "24.00 MiB", "102.1 MiB", "2.00 GiB"]
