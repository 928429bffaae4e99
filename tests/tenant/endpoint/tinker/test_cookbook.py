"""The supervised and RL loops of tinker-cookbook, unchanged, with local data. Skipped without the package, which
`pip install --no-deps tinker-cookbook chz blobfile cloudpickle lxml pycryptodomex pyrage termcolor` adds: the package
index has no tml-renderers of the version that it asks for, and these loops import none."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook")

import chz
from tinker_cookbook import renderers
from tinker_cookbook.rl import problem_env, train as rl, types as environments
from tinker_cookbook.supervised import data as chats, train as supervised
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

from tests.tenant.endpoint.tinker.conftest import KEYS, collect, served

pytestmark = pytest.mark.filterwarnings("ignore")  # of the cookbook and of the client
RENDERER = "role_colon"


@pytest.fixture
def address(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("TINKER_API_KEY", KEYS[0])
    with served(checkpoint, tmp_path / "checkpoints", name=str(checkpoint)) as address:
        monkeypatch.setenv("TINKER_BASE_URL", address)
        yield address
    collect()


def written(log: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / file).read_text().splitlines()]


def common(checkpoint: Path, log: Path) -> dict[str, Any]:
    name = str(checkpoint)
    return {"log_path": str(log), "model_name": name, "recipe_name": "test", "renderer_name": RENDERER, "lora_rank": 4}


@pytest.mark.usefixtures("address")
def test_supervised(checkpoint: Path, tmp_path: Path) -> None:
    texts, log = tmp_path / "texts.jsonl", tmp_path / "log"
    chat = [{"role": "user", "content": "capital?"}, {"role": "assistant", "content": "Paris"}]
    texts.write_text(f"{json.dumps({'messages': chat})}\n" * 16)
    reading = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=str(checkpoint), renderer_name=RENDERER, max_length=64, batch_size=4
    )
    builder = chats.FromConversationFileBuilder(common_config=reading, file_path=str(texts))
    given = common(checkpoint, log) | {"dataset_builder": builder}
    asyncio.run(supervised.main(supervised.Config(learning_rate=1e-2, save_every=2, **given)))
    losses = [one["train_mean_nll"] for one in written(log, "metrics.jsonl") if "train_mean_nll" in one]
    assert losses[-1] < losses[0]
    assert written(log, "checkpoints.jsonl")[-1]["name"] == "final"


class Question(problem_env.ProblemEnv):  # type: ignore[misc]
    def get_question(self) -> str:
        return "2"

    def check_answer(self, sample_str: str) -> bool:
        return len(sample_str) % 2 == 0

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "even"


class Questions(environments.RLDataset):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.renderer = renderers.get_renderer(RENDERER, get_tokenizer(name))

    def get_batch(self, index: int) -> Sequence[Any]:
        return [problem_env.ProblemGroupBuilder(env_thunk=lambda: Question(self.renderer), num_envs=4)] * 2

    def __len__(self) -> int:
        return 2


@chz.chz
class QuestionsBuilder(environments.RLDatasetBuilder):  # type: ignore[misc]
    name: str

    async def __call__(self) -> tuple[Any, None]:
        return Questions(self.name), None


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_rl(checkpoint: Path, tmp_path: Path, loss: Any) -> None:
    log = tmp_path / "log"
    given = common(checkpoint, log) | {"dataset_builder": QuestionsBuilder(name=str(checkpoint)), "loss_fn": loss}
    asyncio.run(rl.main(rl.Config(learning_rate=1e-3, max_tokens=4, save_every=1, **given)))
    assert sum("env/all/reward/total" in one for one in written(log, "metrics.jsonl")) == 2
    assert written(log, "checkpoints.jsonl")[-1]["name"] == "final"
