"""One episode of an environment: reply, step, observation, until it ends."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

from molt.agents.calls import call
from molt.agents.completions import CompletionClient
from molt.agents.context import Context, message_text, user_message
from molt.agents.env import Env, StepState
from molt.agents.errors import InvalidResultError, ServerError
from molt.agents.results import Result, check_result

CLOSE_LIMIT_S = 10.0
"""How long an environment may take to close."""

log = logging.getLogger(__name__)


async def run_episode(env: Env, ctx: Context, *, client: CompletionClient, max_turns: int) -> Result:
    """Run `env` to its end and close it.

    Returns:
        The sum of the steps' rewards, the last score given, all info merged (later steps win), and whether the
        episode was truncated.
    """
    try:
        opening = await call(env.reset, ctx.data)
        messages = [*ctx.messages, *_observed(opening, ())]
        if not messages:
            raise InvalidResultError("nothing to ask: the task row has no messages or prompt, and reset returned None")
        steps: list[Result] = []
        for turn in range(max_turns):
            step = await _turn(env, ctx, client=client, messages=messages, steps=steps)
            if step is None:  # no room for another reply: the episode ends where it stands
                return _episode_result(steps, cut=True)
            steps.append(step)
            if step.terminated or step.truncated:
                break
            observed = _observed(step.observation, step.images)
            if not observed:
                raise InvalidResultError(f"step {turn} returned terminated=False without an observation")
            messages += observed
        return _episode_result(steps, cut=not steps[-1].terminated)
    finally:
        await _close(env)


async def _turn(
    env: Env, ctx: Context, *, client: CompletionClient, messages: list[Any], steps: list[Result]
) -> Result | None:
    """Add one reply to `messages` and step on it; None when the conversation no longer fits the context window."""
    sampling_params = (steps[-1].sampling_params if steps else None) or ctx.sampling_params
    try:
        reply = await client.complete(ctx, messages, sampling_params)
    except ServerError as exc:
        if steps and exc.code == "context_length_exceeded":
            return None
        raise
    observation_text = next((message_text(m) for m in reversed(messages) if m.get("role") == "user"), "")
    messages.append(reply.message)
    state = StepState(
        action_text=message_text(reply.message),
        observation_text=observation_text,
        label=ctx.label,
        messages=list(messages),
        turn=len(steps),
        data=ctx.data,
        finish_reason=reply.finish_reason,
    )
    try:
        return check_result(await call(env.step, state))
    except InvalidResultError as exc:
        raise InvalidResultError(f"step {len(steps)}: {exc}") from exc


def _episode_result(steps: list[Result], *, cut: bool) -> Result:
    info: dict[str, Any] = {}
    for step in steps:
        info |= step.info
    return Result(
        reward=sum(step.reward for step in steps),
        truncated=cut or steps[-1].truncated,
        info=info,
        score=next((step.score for step in reversed(steps) if step.score is not None), None),
    )


def _observed(observation: object, images: Sequence[str]) -> list[Any]:
    """Turn an observation into chat messages."""
    if observation is None and not images:
        return []
    if observation is None or isinstance(observation, str):
        return [user_message(observation or "", images)]
    if images:
        raise InvalidResultError("images go with an observation given as text: put them into the messages instead")
    if isinstance(observation, list | tuple):
        messages = cast("Sequence[object]", observation)
        if all(isinstance(m, dict) and "role" in m for m in messages):
            return list(messages)
    raise InvalidResultError(f"observation is {observation!r:.80}: use text, or a list of chat messages")


async def _close(env: Env) -> None:
    """Close `env`, within the limit; a failure to close does not change the outcome."""
    closing = asyncio.create_task(call(env.close))
    try:
        await asyncio.wait({closing}, timeout=CLOSE_LIMIT_S)
    finally:
        if not closing.done():
            closing.cancel()
            log.warning("%s.close took longer than %g s and was abandoned", type(env).__name__, CLOSE_LIMIT_S)
    if closing.done() and not closing.cancelled() and (error := closing.exception()):
        log.warning("%s.close failed: %r", type(env).__name__, error, exc_info=error)
