"""Who decides how a call samples, and that what was used is recorded."""

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
OWN = {"max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "stop": ("OWN",)}
WISHES = {"max_tokens": 5, "temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0,
          "frequency_penalty": 0.5, "seed": 4, "stop": ["THEIRS", "OWN"]}  # fmt: skip
NEUTRAL = {"top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None}


async def used(bench, policy, own, **wishes):
    caller = bench.open(policy, **own)
    response = await caller.post("/v1/chat/completions", {"messages": USER, **wishes})
    assert response.status_code == 200
    return caller.turns[0].sampling, caller.session.counters


async def test_enforce_takes_the_sessions(bench):
    sampling, counters = await used(bench, "enforce", OWN, **WISHES)
    assert sampling == {**OWN, **NEUTRAL, "stop": ("OWN", "THEIRS")}
    assert counters == {"sampling_overridden": 1}
    same = {name: OWN[name] for name in ("max_tokens", "temperature", "top_p")}
    assert (await used(bench, "enforce", OWN, **same))[1] == {}
    assert (await used(bench, "enforce", OWN))[1] == {}


async def test_default_takes_the_sessions_where_the_client_is_silent(bench):
    assert (await used(bench, "default", OWN))[0] == {**OWN, **NEUTRAL}
    assert (await used(bench, "default", OWN, temperature=0.0))[0] == {**OWN, **NEUTRAL, "temperature": 0.0}
    assert (await used(bench, "default", OWN, **WISHES))[0] == {**WISHES, "stop": ("OWN", "THEIRS")}


async def test_client_takes_the_clients(bench):
    assert (await used(bench, "client", OWN, **WISHES))[0] == {**WISHES, "stop": ("OWN", "THEIRS")}
    assert (await used(bench, "client", OWN))[0] == {**OWN, **NEUTRAL, "temperature": 1.0, "top_p": 1.0}


async def test_max_completion_tokens_wins_and_too_many_are_clamped_not_refused(bench):
    assert (await used(bench, "client", OWN, max_tokens=7, max_completion_tokens=6))[0]["max_tokens"] == 6
    bench.serve({"text": "hello"}, max_model_len=100)
    sampling, counters = await used(bench, "client", OWN, max_tokens=128000)
    assert sampling["max_tokens"] == 100 - bench.renderer.count(USER, [])
    assert counters == {"max_tokens_clamped": 1}


async def test_the_engine_is_given_what_is_recorded(bench):
    bench.serve({"text": "one two three four five six"})
    caller = bench.open("enforce", max_tokens=3)
    await caller.openai.chat.completions.create(model="m", messages=USER, max_tokens=50)
    assert len(bench.log[0]["token_ids"]) == 3
    assert caller.turns[0].finish_reason == "length"
