"""Lists read an item at a time: any cut, any member, and pods of any size in little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from monitor_pods import pod

from isolator.monitor.liststream import ListStream

WHOLE = {
    "kind": "PodList",
    "metadata": {"resourceVersion": "12", "remainingItemCount": 3},
    "items": [{"name": "é\u2028\U0001f600", "n": [1, 2.5, None, {}]}, {}, "x", 17],
    "last": 5,
}


def _read(data: bytes, size: int) -> tuple[list[Any], dict[str, Any]]:
    stream = ListStream(data[at : at + size] for at in range(0, len(data), size))
    return list(stream.items()), stream.fields


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_any_cut_gives_the_same_list(size: int, ascii_only: bool, indent: int | None) -> None:
    """Wherever the pieces are cut, amid characters and numbers too, items and members are those sent."""
    data = json.dumps(WHOLE, ensure_ascii=ascii_only, indent=indent).encode() + b"\n"
    items, fields = _read(data, size)

    assert items == WHOLE["items"]
    assert fields == {key: value for key, value in WHOLE.items() if key != "items"}


@pytest.mark.parametrize("items", ["[]", "null", "[ ]"])
def test_a_list_may_be_empty(items: str) -> None:
    """No item, in each way to write it."""
    found, fields = _read(b'{"items":%s,"metadata":{"resourceVersion":"1"}}' % items.encode(), 5)

    assert found == []
    assert fields["metadata"] == {"resourceVersion": "1"}


def test_what_is_no_whole_list_is_a_known_failure() -> None:
    """A list cut anywhere, and what is none, end in ValueError, never in a shorter list."""
    data = json.dumps(WHOLE).encode()
    for end in range(len(data)):
        with pytest.raises(ValueError):
            _read(data[:end], 16)
    for other in (b"[]", b"<html>", b'{"items":[1 2]}', b'{"a" 1}', b"\xff\xfe"):
        with pytest.raises(ValueError):
            _read(other, 16)


def test_large_pods_are_in_memory_one_at_a_time() -> None:
    """Thirty pods of 1.5 MB each take the memory of one or two."""
    large = pod(1)
    large["spec"]["containers"][0]["env"] = [{"name": f"V{i}", "value": "x" * 190} for i in range(6800)]
    text = json.dumps(large).encode()
    assert len(text) > 1_450_000

    def pieces() -> Iterator[bytes]:
        yield b'{"kind":"PodList","metadata":{"resourceVersion":"1"},"items":['
        for number in range(30):
            yield b"," if number else b""
            for at in range(0, len(text), 1 << 16):
                yield text[at : at + (1 << 16)]
        yield b"]}"

    tracemalloc.start()
    try:
        assert sum(1 for _ in ListStream(pieces()).items()) == 30
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20
