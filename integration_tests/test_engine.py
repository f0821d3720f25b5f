"""vLLM behind the gateway: what its sampling, grammars, log-probs and prefix cache really do.

The model has random weights, so a reply that has the form asked for has it by the grammar alone.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytestmark = pytest.mark.timeout(300)

USER = [{"role": "user", "content": "How much is 2 + 3?"}]
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "mode": {"enum": ["slow", "fast"]}},
    "required": ["on", "mode"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SWITCH, "strict": True}} for name in ("lamp", "fan")
]


class Caller:
    """A session of the stand-alone gateway."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=url, headers={"authorization": "Bearer gateway-token"}, timeout=60)
        reply = self.http.post("/api/v1/sessions", json={}).json()
        self._id, self._key, self._base = reply["session_id"], reply["api_key"], reply["base_url"]

    def post(self, **body):
        body = {"model": "policy", "messages": USER, "max_tokens": 120, "seed": 7, **body}
        headers = {"authorization": f"Bearer {self._key}"}
        return self.http.post(f"{self._base}/chat/completions", json=body, headers=headers)

    def choice(self, **body):
        response = self.post(**body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    @property
    def recording(self):
        return self.http.get(f"/api/v1/sessions/{self._id}").json()


@pytest.fixture
def caller(gateway):
    return Caller(gateway.url)


def check_switch(text):
    value = json.loads(text)
    assert set(value) == {"on", "mode"}
    assert isinstance(value["on"], bool)
    assert value["mode"] in ("slow", "fast")


def test_a_response_format_is_kept_to_and_its_turn_is_not_trained(caller):
    wanted = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SWITCH}}
    choice = caller.choice(response_format=wanted)
    assert choice["finish_reason"] == "stop"
    check_switch(choice["message"]["content"])
    (turn,) = caller.recording["turns"]
    assert turn["off_policy"] == ["grammar"]
    assert max(turn["logprobs"]) == 0.0, "where the grammar leaves one token, its probability is 1"
    (segment,) = caller.recording["segments"]
    assert (segment["trained"], segment["untrained_reason"]) == (False, "off_policy")
    assert caller.recording["counters"]["untrained_turns.off_policy"] == 1


@pytest.mark.parametrize(
    ("chosen", "names"),
    [("required", {"lamp", "fan"}), ({"type": "function", "function": {"name": "fan"}}, {"fan"})],
)
def test_a_tool_call_that_is_required_is_made_with_strict_arguments(caller, chosen, names):
    message = caller.choice(tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in names
    check_switch(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
         "response_format"),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}},
         "response_format"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"tool_choice": "required",
          "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "odd"}}}]},
         "tools"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_vllm_refuses_is_the_clients_fault_and_leaves_no_turn(caller, body, param, stream):
    response = caller.post(**body, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "/" not in error["message"], "no line of somebody's source"
    assert caller.recording["turns"] == []
    assert caller.choice(max_tokens=1)["finish_reason"] == "length", "the engine goes on"


def test_a_logit_bias_is_obeyed_and_flagged(caller):
    plain = caller.choice(max_tokens=1)
    (token,) = caller.recording["turns"][0]["token_ids"]
    caller.choice(max_tokens=3, logit_bias={str(token): 100})
    assert plain["finish_reason"] == "length"
    biased = caller.recording["turns"][1]
    assert (biased["token_ids"], biased["off_policy"]) == ([token] * 3, ["logit_bias"])


def test_log_probs_are_those_of_the_tempered_distribution_trl_4159_nemo_rl_902_vime_64(caller):
    """The temperature divides the logits: at T the distance of two log-probs is that at 1, divided by T."""

    def ranked(temperature):
        choice = caller.choice(max_tokens=1, temperature=temperature, logprobs=True, top_logprobs=5)
        (position,) = choice["logprobs"]["content"]
        return position, {top["token"]: top["logprob"] for top in position["top_logprobs"]}

    _, plain = ranked(1.0)
    for temperature in (0.5, 2.0):
        position, tempered = ranked(temperature)
        best, *others = [token for token in plain if token in tempered]
        assert len(others) >= 4, "the order of tokens does not change"
        for other in others:
            expected = (plain[best] - plain[other]) / temperature
            assert tempered[best] - tempered[other] == pytest.approx(expected, abs=1e-4)
        turn = caller.recording["turns"][-1]
        assert turn["logprobs"] == [position["logprob"]], "the record has what the client sees"
        assert turn["off_policy"] == []


def test_the_next_turn_of_a_conversation_finds_its_prefix_in_the_cache(caller):
    """PrimeIntellect-ai/prime-rl#2822: and whoever serves can see how much of the prompts was found."""
    long = [{"role": "user", "content": "How much is 2 + 3? " * 20}]
    first = caller.post(messages=long, max_tokens=2).json()
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    second = caller.post(messages=[*long, said, *USER], max_tokens=2).json()
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
    assert cached[0] == 0
    assert 0 < cached[1] < second["usage"]["prompt_tokens"]
    assert caller.recording["turns"][1]["parent_turn_id"] == caller.recording["turns"][0]["turn_id"]
    metrics = caller.http.get("/metrics").text
    counts = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if 'wire="chat"' in line}
    assert 0 < counts["molt_gateway_cached_tokens_total"] < counts["molt_gateway_prompt_tokens_total"]


def test_a_seed_fixes_the_sample_whatever_else_the_engine_has_to_do(caller):
    """Two dozen prompts at once are more than one batch takes. vLLM's CPU engine died of a seeded one cut in chunks."""
    long = [{"role": "user", "content": "How much is 2 + 3? " * 25}]

    def sample(seed):
        choice = caller.choice(messages=long, max_tokens=8, seed=seed)
        return choice["message"]["content"]

    with ThreadPoolExecutor(24) as threads:
        crowded = list(threads.map(sample, [seed % 12 for seed in range(24)]))
    assert crowded[:12] == crowded[12:]
    assert len(set(crowded)) > 1, "another seed is another sample"
    assert sample(3) == crowded[3]
