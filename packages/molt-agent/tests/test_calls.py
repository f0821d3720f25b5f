"""Calling what the user wrote."""

import asyncio
import contextvars
import functools
import threading

import pytest

from molt.agents.calls import call

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


async def test_async_functions_run_on_the_loop_and_plain_ones_in_a_thread():
    async def on_loop(value: int) -> tuple[int, int]:
        return value, threading.get_ident()

    def in_thread(value: int) -> tuple[int, int]:
        return value, threading.get_ident()

    assert await call(on_loop, 1) == (1, threading.get_ident())
    value, thread = await call(in_thread, 2)
    assert value == 2
    assert thread != threading.get_ident()


async def test_a_decorated_async_function_is_awaited_on_the_loop():
    async def inner() -> int:
        return threading.get_ident()

    @functools.wraps(inner)
    def decorated():  # a plain function that returns a coroutine
        return inner()

    assert await call(decorated) == threading.get_ident()


async def test_threads_see_the_context_of_their_caller():
    variable.set("rollout 7")
    assert await call(variable.get) == "rollout 7"


async def test_there_are_as_many_threads_as_calls():
    barrier = threading.Barrier(64)  # more than any default pool has
    places = await asyncio.gather(*(call(barrier.wait, 10) for _ in range(64)))
    assert sorted(places) == list(range(64)), "all were at the barrier at once"


async def test_a_blocked_thread_does_not_outlast_a_cancelled_call():
    blocked, released = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        released.wait()

    task = asyncio.create_task(call(block))
    assert await call(blocked.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()


@pytest.mark.parametrize(
    ("raised", "seen"), [(StopIteration, RuntimeError), (SystemExit, SystemExit), (KeyError, KeyError)]
)
async def test_whatever_a_thread_raises_reaches_the_caller(raised: type[BaseException], seen: type[BaseException]):
    def fail() -> None:
        raise raised

    with pytest.raises(seen):
        await call(fail)
