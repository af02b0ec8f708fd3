"""The API server's answer to a list, read one item at a time.

A node's pods may be of 1.5 MB each: whole, their text and what it is parsed into would be the monitor's
memory many times over. Asking for pages would not help: a list from the API server's cache
(resourceVersion=0) ignores `limit`, and pages from etcd cost it the cluster's pods for each node's.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

MOST_ITEM: Final = 32 << 20
"""Characters of one item: 3 MiB, of which each may be written as six."""
_BLANK: Final = " \t\r\n"


class ListStream:
    """A list object in `pieces` of UTF-8. `items` gives its items, then `fields` has the other members."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self.fields: dict[str, Any] = {}

    def items(self) -> Iterator[Any]:
        """Raises ValueError where the answer is not one whole list, and what `pieces` raises."""
        self._expect("{")
        while True:
            key = self._value()
            self._expect(":")
            if key == "items" and self._peek() == "[":
                yield from self._array()
            else:
                self.fields[key] = self._value()
            if self._expect(",}") == "}":
                return

    def _array(self) -> Iterator[Any]:
        self._expect("[")
        if self._peek() == "]":
            self._expect("]")
            return
        while True:
            yield self._value()
            if self._expect(",]") == "]":
                return

    def _fill(self) -> bool:
        """Takes one more piece; whether there was one."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._text = self._text[self._at :] + self._decoder.decode(piece)
        self._at = 0
        return True

    def _peek(self) -> str:
        """The next character that is not blank, left where it is."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANK:
                    return self._text[self._at]
                self._at += 1
            if not self._fill():
                raise ValueError("the API server's list ends early")

    def _expect(self, one_of: str) -> str:
        found = self._peek()
        if found not in one_of:
            raise ValueError("the API server's answer is not a list")
        self._at += 1
        return found

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
                if end < len(self._text):  # else a number may go on
                    self._at = end
                    return value
            except json.JSONDecodeError:
                pass
            # Twice as much before the next try: the tries together stay within twice the last one.
            have = len(self._text) - self._at
            if have > MOST_ITEM:
                raise ValueError("an item of the API server's list is too long")
            while len(self._text) - self._at < 2 * have and self._fill():
                pass
            if len(self._text) - self._at == have:
                raise ValueError("the API server's list ends early")
