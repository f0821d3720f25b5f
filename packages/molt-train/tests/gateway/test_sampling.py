"""Who decides how a call samples, that what was used is recorded, and that what the loss cannot weigh is flagged."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from molt.agents.protocol import SamplingParams
from molt.train.engine.protocol import EngineSampling
from molt.train.gateway.sampling import off_policy_reasons

from .replies import CALCULATOR

pytestmark = pytest.mark.asyncio(loop_scope="session")

USER = [{"role": "user", "content": "hi"}]
OWN = {"max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "stop": ["OWN"]}
WISHES = {"max_tokens": 5, "temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0,
          "frequency_penalty": 0.5, "seed": 4, "logit_bias": {"7": -2.0}, "stop": ["THEIRS", "OWN"]}  # fmt: skip
NEUTRAL = {"top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None,
           "logit_bias": {}, "grammar": None}  # fmt: skip
THEIRS = {**WISHES, "logit_bias": {"7": -2.0}, "grammar": None, "stop": ["OWN", "THEIRS"]}


async def used(bench, policy, own, **wishes):
    caller = bench.open(policy, **own)
    response = await caller.post("/v1/chat/completions", {"messages": USER, **wishes})
    assert response.status_code == 200
    (turn,) = caller.turns
    return turn, caller.session.counters


async def sampling_of(bench, policy, own, **wishes):
    return (await used(bench, policy, own, **wishes))[0].sampling


async def test_enforce_takes_the_sessions_and_counts_what_it_overrides(bench):
    turn, counters = await used(bench, "enforce", OWN, **WISHES)
    assert turn.sampling == {**OWN, **NEUTRAL, "stop": ["OWN", "THEIRS"]}
    assert turn.off_policy == []
    assert counters == {"sampling_overridden": 1}


@pytest.mark.parametrize("name", [name for name in WISHES if name != "stop"])
async def test_enforce_overrides_each_parameter(bench, name):
    turn, counters = await used(bench, "enforce", OWN, **{name: WISHES[name]})
    assert turn.sampling == {**OWN, **NEUTRAL}
    assert counters == {"sampling_overridden": 1}


async def test_asking_for_what_is_used_anyway_is_no_override(bench):
    same = {name: OWN[name] for name in ("max_tokens", "temperature", "top_p")}
    off = {"top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
    for wishes in ({}, same, off, {"top_k": 0}, {"stop": "X"}):
        assert (await used(bench, "enforce", OWN, **wishes))[1] == {}


async def test_default_takes_the_sessions_where_the_client_is_silent(bench):
    assert await sampling_of(bench, "default", OWN) == {**OWN, **NEUTRAL}
    assert await sampling_of(bench, "default", OWN, temperature=0.0) == {**OWN, **NEUTRAL, "temperature": 0.0}
    assert await sampling_of(bench, "default", OWN, **WISHES) == THEIRS


async def test_client_takes_the_clients(bench):
    assert await sampling_of(bench, "client", OWN, **WISHES) == THEIRS
    assert await sampling_of(bench, "client", OWN) == {**OWN, **NEUTRAL, "temperature": 1.0, "top_p": 1.0}


async def test_max_completion_tokens_wins_and_too_many_are_clamped_not_refused(bench):
    assert (await sampling_of(bench, "client", OWN, max_tokens=7, max_completion_tokens=6))["max_tokens"] == 6
    bench.serve({"text": "hello"}, max_model_len=100)
    turn, counters = await used(bench, "client", OWN, max_tokens=128000)
    assert turn.sampling["max_tokens"] == 100 - bench.renderer.count(USER, [])
    assert counters == {"max_tokens_clamped": 1}


async def test_the_engine_is_given_what_is_recorded(bench):
    bench.serve({"text": "one two three four five six"})
    caller = bench.open("enforce", max_tokens=3)
    await caller.openai.chat.completions.create(model="m", messages=USER, max_tokens=50)
    assert len(bench.log[0]["token_ids"]) == 3
    assert caller.turns[0].finish_reason == "length"


# huggingface/trl PR#7269, verl-project/verl#6240, PrimeIntellect-ai/prime-rl#2600: top-p or top-k below 1 biases the
# ratio of the loss, so such turns are flagged.


@pytest.mark.parametrize(
    ("wishes", "reasons"),
    [
        ({"top_k": 20}, ["top_k"]),
        ({"top_p": 0.9}, ["top_p"]),
        ({"min_p": 0.1}, ["min_p"]),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.5}, ["presence_penalty", "frequency_penalty"]),
        ({"logit_bias": {"1": 1}}, ["logit_bias"]),
        ({"temperature": 0}, ["greedy"]),
        ({"temperature": 0.5, "seed": 1, "stop": "x", "max_tokens": 3, "top_k": -1}, []),
        ({"response_format": {"type": "json_object"}}, ["grammar"]),
        ({"tools": [CALCULATOR], "tool_choice": "required"}, ["grammar"]),
        ({"tools": [CALCULATOR], "parallel_tool_calls": False}, ["grammar"]),
        ({"tools": [CALCULATOR]}, []),
    ],
)
async def test_what_the_loss_cannot_weigh_is_flagged_trl_7269_verl_6240_prime_rl_2600(bench, wishes, reasons):
    assert (await used(bench, "client", {}, **wishes))[0].off_policy == reasons


async def test_a_configured_top_p_is_flagged_only_where_it_is_not_the_one_used():
    def reasons(used, expected):
        return off_policy_reasons(EngineSampling(max_tokens=1, top_p=used), SamplingParams(top_p=expected))

    assert [reasons(*pair) for pair in ((1.0, 1.0), (0.9, 0.9), (0.9, 1.0), (1.0, 0.9))] == [
        (), (), ("top_p",), ("top_p",),
    ]  # fmt: skip


async def test_a_session_with_parameters_of_its_own_is_measured_by_those_of_the_run(bench):
    session, key = bench.sessions.open(
        sampling=SamplingParams(top_p=0.5), policy="enforce", expected_sampling=SamplingParams()
    )
    path = f"{bench.url}/s/{session.session_id}/v1/chat/completions"
    response = await bench.http.post(path, json={"messages": USER}, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200
    assert session.turns()[0].off_policy == ["top_p"]


async def test_a_grammar_is_part_of_the_task_under_every_policy(bench):
    for policy in ("enforce", "default", "client"):
        turn, counters = await used(bench, policy, {}, response_format={"type": "json_object"})
        assert turn.sampling["grammar"]["kind"] == "structural_tag"
        assert (turn.off_policy, counters) == (["grammar"], {})


@pytest.mark.parametrize(
    ("policy", "reasons", "counters"),
    [("enforce", [], {"strict_not_enforced": 1}), ("default", ["grammar"], {}), ("client", ["grammar"], {})],
)
async def test_strict_arguments_bound_the_sampling_only_where_it_is_the_clients(bench, policy, reasons, counters):
    """The Agents SDK marks every tool so: a run whose turns were all bound by a grammar would train nothing."""
    strict = {"type": "function", "function": CALCULATOR["function"] | {"strict": True}}
    turn, counted = await used(bench, policy, {}, tools=[strict])
    assert (turn.off_policy, counted) == (reasons, counters)
