"""What a call really samples with: the session's parameters, the client's wishes, and the room in the window."""

from operator import attrgetter
from typing import TypeVar

from molt.agents.protocol import SamplingParams
from molt.train.engine.protocol import EngineSampling, Grammar
from molt.train.gateway.call import SamplingWishes
from molt.train.gateway.sessions import Session

_Number = TypeVar("_Number", int, float)
_UNWEIGHABLE = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "grammar")
_unweighable_of = attrgetter(*_UNWEIGHABLE)
_OFF = _unweighable_of(EngineSampling(max_tokens=1))[1:]
_WISHES = tuple(name for name in SamplingWishes.__struct_fields__ if name not in ("max_tokens", "stop"))
_wished = attrgetter(*_WISHES)
_NOTHING = (None,) * len(_WISHES)


def effective_sampling(
    session: Session, wishes: SamplingWishes, room: int, *, grammar: Grammar | None = None, seed: int | None = None
) -> EngineSampling:
    """The sampling of one call under the session's policy, `max_tokens` clamped to `room`.

    `enforce`: the session's parameters, whatever the client sends, its seed included; `default`: the session's where
    the client sends none; `client`: the client's, and the session's `max_tokens` only where it sends none. `seed` is
    the session's for this call, and under no policy but `enforce` used where the client sends its own. Stop strings of
    both apply always: they cut, and leave the distribution of every token as it is. So does `grammar`, which is part
    of the task. Counts `sampling_overridden` and `max_tokens_clamped`.
    """
    own = session.sampling
    stop = tuple(dict.fromkeys((*own.stop, *wishes.stop)))
    if session.policy == "enforce":
        if _differs(session, wishes):
            session.count("sampling_overridden")
        return EngineSampling(
            max_tokens=_clamped(session, own.max_tokens, room),
            temperature=own.temperature,
            top_p=own.top_p,
            stop=stop,
            seed=seed,
            grammar=grammar,
        )
    temperature, top_p = (own.temperature, own.top_p) if session.policy == "default" else (1.0, 1.0)
    if _wished(wishes) == _NOTHING:
        max_tokens = _clamped(session, _first(wishes.max_tokens, own.max_tokens), room)
        return EngineSampling(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, grammar=grammar
        )
    return EngineSampling(
        max_tokens=_clamped(session, _first(wishes.max_tokens, own.max_tokens), room),
        temperature=_first(wishes.temperature, temperature),
        top_p=_first(wishes.top_p, top_p),
        top_k=max(0, _first(wishes.top_k, 0)),  # -1 is off, too
        min_p=_first(wishes.min_p, 0.0),
        presence_penalty=_first(wishes.presence_penalty, 0.0),
        frequency_penalty=_first(wishes.frequency_penalty, 0.0),
        stop=stop,
        seed=seed if wishes.seed is None else wishes.seed,
        logit_bias=wishes.logit_bias or {},
        grammar=grammar,
    )


def off_policy_reasons(sampling: EngineSampling, expected: SamplingParams) -> tuple[str, ...]:
    """The parameters by which a sample is not from the distribution that the loss expects, and cannot be weighed.

    What rules tokens out or depends on the tokens before (`top_k`, `min_p`, `grammar`, penalties, `logit_bias`, and
    `greedy`, which is temperature 0) has no place in the loss. `top_p` has one where a run is configured with it, so it
    counts only where it is another than `expected`. Any temperature above 0 gives every token its probability: the
    recorded log-prob is that of the tempered distribution, and the importance correction weighs it.
    """
    values, neutral = _unweighable_of(sampling), (expected.top_p, *_OFF)
    reasons = () if values == neutral else _named_differences(values, neutral)
    return ("greedy", *reasons) if sampling.temperature == 0 else reasons


def _named_differences(values: tuple[object, ...], neutral: tuple[object, ...]) -> tuple[str, ...]:
    compared = zip(_UNWEIGHABLE, values, neutral, strict=True)
    return tuple([name for name, value, off in compared if value != off])


def _first(wish: _Number | None, otherwise: _Number) -> _Number:
    return otherwise if wish is None else wish


def _clamped(session: Session, max_tokens: int, room: int) -> int:
    if max_tokens > room:
        session.count("max_tokens_clamped")
    return min(max_tokens, room)


def _differs(session: Session, wishes: SamplingWishes) -> bool:
    """Whether the client asks for another sampling than the session's. Asking for what is off by default is not."""
    own = session.sampling
    allowed: dict[str, tuple[object, ...]] = {
        "max_tokens": (own.max_tokens,),
        "temperature": (own.temperature,),
        "top_p": (own.top_p,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "logit_bias": ({},),
        "seed": (),
    }
    return any(
        (wish := getattr(wishes, name)) is not None and wish not in harmless for name, harmless in allowed.items()
    )
