"""The supervised and RL loops of tinker-cookbook, unchanged, with local data. Skipped without the package, which
`pip install --no-deps tinker-cookbook chz blobfile cloudpickle pyrage termcolor` adds: the package index has no
tml-renderers of the version that it asks for, and these loops import none."""

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


def saved(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]


def figures(log: Path, name: str) -> list[float]:
    found = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return [one[name] for one in found if name in one]


@pytest.mark.usefixtures("address")
def test_supervised(checkpoint: Path, tmp_path: Path) -> None:
    texts, name = tmp_path / "texts.jsonl", str(checkpoint)
    chat = [{"role": "user", "content": "capital?"}, {"role": "assistant", "content": "Paris"}]
    texts.write_text(f"{json.dumps({'messages': chat})}\n" * 16)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=name, renderer_name=RENDERER, max_length=64, batch_size=4
    )
    config = supervised.Config(
        log_path=str(tmp_path / "log"),
        model_name=name,
        recipe_name="test",
        renderer_name=RENDERER,
        dataset_builder=chats.FromConversationFileBuilder(common_config=common, file_path=str(texts)),
        learning_rate=1e-2,
        lora_rank=4,
        save_every=2,
    )
    asyncio.run(supervised.main(config))
    losses = figures(tmp_path / "log", "train_mean_nll")
    assert losses[-1] < losses[0]
    assert saved(tmp_path / "log")[-1]["name"] == "final"


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
    config = rl.Config(
        learning_rate=1e-3,
        dataset_builder=QuestionsBuilder(name=str(checkpoint)),
        model_name=str(checkpoint),
        recipe_name="test",
        renderer_name=RENDERER,
        max_tokens=4,
        log_path=str(tmp_path / "log"),
        lora_rank=4,
        loss_fn=loss,
        save_every=1,
    )
    asyncio.run(rl.main(config))
    assert len(figures(tmp_path / "log", "env/all/reward/total")) == 2
    assert saved(tmp_path / "log")[-1]["name"] == "final"
