"""What a call really samples with: the session's parameters, the client's wishes, and the room in the window."""

from typing import TypeVar

from molt.train.engine.protocol import EngineSampling
from molt.train.gateway.call import SamplingWishes
from molt.train.gateway.sessions import Session

_Number = TypeVar("_Number", int, float)


def effective_sampling(session: Session, wishes: SamplingWishes, room: int) -> EngineSampling:
    """The sampling of one call under the session's policy, `max_tokens` clamped to `room`.

    `enforce`: the session's parameters, whatever the client sends; `default`: the session's where the client sends
    none; `client`: the client's, and the session's `max_tokens` only where it sends none. Stop strings of both apply
    always: they cut, and leave the distribution of every token as it is. Counts `sampling_overridden` and
    `max_tokens_clamped`.
    """
    own = session.sampling
    stop = tuple(dict.fromkeys((*own.stop, *wishes.stop)))
    if session.policy == "enforce":
        if _differs(session, wishes):
            session.count("sampling_overridden")
        max_tokens = _clamped(session, own.max_tokens, room)
        return EngineSampling(max_tokens=max_tokens, temperature=own.temperature, top_p=own.top_p, stop=stop)
    neutral = EngineSampling(max_tokens=own.max_tokens)
    temperature, top_p = (own.temperature, own.top_p) if session.policy == "default" else (1.0, 1.0)
    return EngineSampling(
        max_tokens=_clamped(session, _first(wishes.max_tokens, own.max_tokens), room),
        temperature=_first(wishes.temperature, temperature),
        top_p=_first(wishes.top_p, top_p),
        top_k=max(0, _first(wishes.top_k, neutral.top_k)),
        min_p=_first(wishes.min_p, neutral.min_p),
        presence_penalty=_first(wishes.presence_penalty, neutral.presence_penalty),
        frequency_penalty=_first(wishes.frequency_penalty, neutral.frequency_penalty),
        stop=stop,
        seed=wishes.seed,
        logit_bias=wishes.logit_bias or {},
    )


def off_policy_reasons(sampling: EngineSampling) -> tuple[str, ...]:
    """The parameters by which a sample is none of the policy's distribution, at any temperature."""
    neutral = EngineSampling(max_tokens=sampling.max_tokens)
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "grammar")
    reasons = tuple(name for name in names if getattr(sampling, name) != getattr(neutral, name))
    return ("greedy", *reasons) if sampling.temperature == 0 else reasons


def _first(wish: _Number | None, otherwise: _Number) -> _Number:
    return otherwise if wish is None else wish


def _clamped(session: Session, max_tokens: int, room: int) -> int:
    if max_tokens > room:
        session.count("max_tokens_clamped")
    return min(max_tokens, room)


def _differs(session: Session, wishes: SamplingWishes) -> bool:
    own = {"max_tokens": session.sampling.max_tokens, "temperature": session.sampling.temperature}
    own |= {"top_p": session.sampling.top_p, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    asked = {name: getattr(wishes, name) for name in wishes.__struct_fields__ if name != "stop"}
    return any(wish is not None and wish != own.get(name) for name, wish in asked.items())
