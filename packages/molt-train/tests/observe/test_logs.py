"""Logs reach stderr and the run folder, and no secret does."""

import logging

import pytest

from molt.train.observe.logs import configure_logging


@pytest.fixture(autouse=True)
def restore_logger():
    logger = logging.getLogger("molt")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def log_file(tmp_path):
    return tmp_path / "logs" / "server.log"


log = logging.getLogger("molt.train.test")


def test_lines_go_to_stderr_and_to_the_file(log_file, capsys):
    configure_logging(log_file)
    log.info("refit %d took %.1f s", 3, 0.5)
    log.debug("not at this level")
    err = capsys.readouterr().err
    assert err.endswith("INFO molt.train.test: refit 3 took 0.5 s\n")
    assert err == log_file.read_text()


def test_secrets_are_redacted_in_messages_arguments_and_tracebacks(log_file, capsys):
    configure_logging(log_file, secrets=["tok-123", "tok-123456", ""])
    log.info("token tok-123 in the text")
    log.info("and in %s", {"authorization": "Bearer tok-123456"})
    try:
        raise RuntimeError("refused tok-123456")
    except RuntimeError:
        log.exception("with a traceback")
    for text in (capsys.readouterr().err, log_file.read_text()):
        assert "tok-123" not in text
        assert "456" not in text
        assert "token [redacted] in the text" in text
        assert "and in {'authorization': 'Bearer [redacted]'}" in text
        assert "RuntimeError: refused [redacted]" in text


def test_the_keys_of_sessions_are_redacted_though_no_list_has_them(log_file, capsys):
    configure_logging(log_file)
    headers = [(b"x-api-key", b"k3y-of-a-session"), (b"authorization", b"Bearer k3y-of-a-session")]
    log.info("headers %s", headers)
    log.info("sent %s", {"X-Api-Key": "k3y-of-a-session", "Authorization": "bearer k3y-of-a-session"})
    log.info("curl -H 'x-api-key: k3y-of-a-session' -H 'authorization: Bearer k3y-of-a-session'")
    log.info("the bearer of news")
    err = capsys.readouterr().err
    assert "k3y" not in err
    assert err.count("[redacted]") == 6
    assert "[(b'x-api-key', b'[redacted]'), (b'authorization', b'Bearer [redacted]')]" in err
    assert "the bearer of news" in err


def test_configuring_again_replaces_the_handlers(tmp_path, capsys):
    configure_logging(tmp_path / "first.log")
    configure_logging(tmp_path / "second.log")
    log.warning("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "first.log").read_text() == ""
    assert "once" in (tmp_path / "second.log").read_text()


def test_without_a_file_only_stderr_is_written(tmp_path, capsys):
    configure_logging(None)
    log.warning("once")
    assert "once" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_stderr_is_looked_up_at_each_line(capsys, monkeypatch):
    """A live view replaces sys.stderr while it runs; lines written past it would tear its picture."""
    import io

    configure_logging(None)
    replaced = io.StringIO()
    monkeypatch.setattr("sys.stderr", replaced)
    log.warning("above the bar")
    assert "above the bar" in replaced.getvalue()
