"""Call what the user wrote, async or plain, without letting it stall the event loop."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Await an async function; run a plain one in a thread of its own.

    A thread that outlives its caller (deadline, lost lease) is left behind: Python cannot stop it. So each call has a
    fresh daemon thread, and a stuck one takes no place in a pool that others wait for.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    value = await _in_thread(function, *args)
    return await value if inspect.isawaitable(value) else value


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller has gone
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(function, *args)
        except StopIteration as exc:  # no future takes a StopIteration
            error = RuntimeError(f"{type(exc).__name__} raised")
            error.__cause__ = exc
        except BaseException as exc:  # noqa: BLE001 - whatever the user's code raises belongs to the caller
            error = exc
        with suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="molt-agent-call", daemon=True).start()
    return await future
