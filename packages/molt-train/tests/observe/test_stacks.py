"""Stacks of other processes: only those that listen are ever sent a signal."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from molt.train.observe.stacks import ask, forget, own_stacks

LISTENER = """
import sys
from pathlib import Path
from molt.train.observe.stacks import listen

def wait_here():
    listen(Path(sys.argv[1]), "actor-0")
    print("ready", flush=True)
    sys.stdin.read()

wait_here()
"""


@pytest.fixture
def start():
    processes = []

    def make(program, *arguments):
        command = [sys.executable, "-c", program, *arguments]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.wait(10)


def test_a_process_that_listens_says_where_it_is_and_goes_on(tmp_path, start):
    process = start(LISTENER, str(tmp_path))
    for _ in range(2):
        ((name, text),) = ask(tmp_path, timeout_s=20.0).items()
        assert name == f"actor-0@{socket.gethostname()}.{process.pid}"
        assert text.count("in wait_here") == 1
    assert process.poll() is None


def test_a_stopped_process_is_said_not_to_answer(tmp_path, start):
    process = start(LISTENER, str(tmp_path))
    os.kill(process.pid, signal.SIGSTOP)
    assert list(ask(tmp_path, timeout_s=0.2).values()) == ["did not answer within 0.2 s\n"]


def test_a_process_that_has_the_number_of_a_dead_one_is_left_alone(tmp_path, start):
    other = start("import sys; print('ready', flush=True); sys.stdin.read()")
    for host in (socket.gethostname(), "elsewhere"):
        (tmp_path / f"engine@{host}.{other.pid}").touch()
    (tmp_path / "notes").touch()
    assert ask(tmp_path, timeout_s=1.0) == {}
    assert other.poll() is None, "the signal would have ended it"


def test_files_of_processes_that_were_never_asked_are_removed(tmp_path):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "a@h.1").touch()
    (tmp_path / "stacks" / "b@h.2").write_text("Thread 1")
    forget(tmp_path / "stacks")
    assert [path.name for path in (tmp_path / "stacks").iterdir()] == ["b@h.2"]
    (tmp_path / "stacks" / "b@h.2").write_text("")
    forget(tmp_path / "stacks")
    assert not (tmp_path / "stacks").exists()
    forget(tmp_path / "stacks")


def test_own_stacks_need_no_event_loop():
    assert "test_own_stacks_need_no_event_loop" in own_stacks()
