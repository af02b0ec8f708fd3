"""Logging of the workloads: standard library, standard error, one line a record, JSON where asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

_PLAIN: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _Json(logging.Formatter):
    """One JSON object a line; what a call gives in `extra` becomes a field."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def setup(level: str = "INFO", as_json: bool = False) -> None:
    """Sends all records of `level` and above to standard error; a second call replaces the first.

    Raises ValueError for a level that logging does not know.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else logging.Formatter(_PLAIN))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
