"""Logging of Molt's own loggers to stderr and to a file of the run folder, with secrets redacted."""

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

LOGGER_NAME = "molt"
REDACTED = "[redacted]"
_CREDENTIALS = re.compile(r"""(?i)(\b(?:bearer|x-api-key)\b["']?[\s:=,]*(?:b(?=["']))?["']?)[^\s"',)]{8,}""")
"""What stands behind the names under which keys travel: those of sessions are on no list."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(log_file: Path | None, *, secrets: Sequence[str] = (), level: int = logging.INFO) -> None:
    """Send the records of `molt` and the loggers under it to stderr, and to `log_file` when one is given.

    Calling it again replaces what an earlier call set up. Other libraries' loggers are left alone.

    Args:
        log_file: Appended to; its folder is made.
        secrets: Strings that must not appear in any line, tracebacks included.
        level: Lowest level that is written.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_StderrHandler()]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file))
    for handler in handlers:
        handler.setFormatter(RedactingFormatter(secrets))
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class RedactingFormatter(logging.Formatter):
    """Replaces secrets, and keys as HTTP carries them, in the finished line: it has arguments and tracebacks in it."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__(_FORMAT)
        # Longest first, so that a secret that contains another leaves no remainder.
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """The line, redacted."""
        line = super().format(record)
        for secret in self._secrets:
            line = line.replace(secret, REDACTED)
        return _CREDENTIALS.sub(rf"\1{REDACTED}", line)


class _StderrHandler(logging.StreamHandler):
    """Writes to what `sys.stderr` is at the moment, so that a live view there can print lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)
