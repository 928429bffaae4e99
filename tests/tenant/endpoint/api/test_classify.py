"""`/classify`, `/score` and `/rerank`: each text has the model's own logits, whatever shares its pass."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from symbiosis_priv.errors import ConfigError
from tenant import RemoteConfig, rounded_model
from tenant.endpoint import serving
from tenant.endpoint.options import Serving
from tests.adapters import write_adapter
from tests.cases import cases
from tests.compatibility.families import build
from tests.tenant.endpoint.conftest import served_at

KEY = "sk-" + "a" * 20
TEXTS = ["a pump", "The report is two pages long, and rather dry.", "!", "pumps and valves " * 4]
TOLERANCE = 1e-4  # relative error of float32 sums in another order


def save(path: Path, tokenizer: Path, name: str, **config: Any) -> Path:
    torch.manual_seed(0)
    coder = AutoTokenizer.from_pretrained(tokenizer)
    build(name, vocab_size=len(coder), **config).save_pretrained(path)
    coder.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def classifier(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with three labels and no token for padding."""
    names = dict(enumerate(("good", "bad", "ugly")))
    return save(
        tmp_path_factory.mktemp("classifier") / "tiny",
        tiny,
        "LlamaForSequenceClassification",
        id2label=names,
        label2id={name: index for index, name in names.items()},
        pad_token_id=None,
    )


@pytest.fixture(scope="module")
def tasks(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tasks")
    for seed, name in enumerate(("mood", "topic")):
        base = AutoModelForSequenceClassification.from_pretrained(classifier)
        config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", modules_to_save=["score"])
        write_adapter(base, folder / name, config, seed=seed, scale=0.2)
    write_adapter(
        AutoModelForSequenceClassification.from_pretrained(classifier),
        folder / "broken",
        LoraConfig(task_type="SEQ_CLS", target_modules=["v_proj", "o_proj"]),
        scale=1e30,
    )
    return {name: folder / name for name in ("mood", "topic", "broken")}


def client_of(model: Path, adapters: dict[str, Path]) -> Iterator[httpx.Client]:
    options, remote = Serving(answer_bucket=48), RemoteConfig(masking="simulate")
    with (
        served_at(model, remote, key=KEY, adapters=adapters, options=options) as (service, address),
        httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        client.steps = lambda: service.engine.load().steps  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
def client(classifier: Path, tasks: dict[str, Path]) -> Iterator[httpx.Client]:
    yield from client_of(classifier, tasks)


def own(model: Any, tokenizer: Any, *texts: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
    return logits.double()


def test_each_text_has_its_own_models_probabilities_in_any_company(
    client: httpx.Client, classifier: Path, tasks: dict[str, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    models = {"tiny": rounded_model(classifier, kind=AutoModelForSequenceClassification)}
    for name, folder in list(tasks.items())[:2]:
        base = rounded_model(classifier, kind=AutoModelForSequenceClassification)
        models[name] = PeftModel.from_pretrained(base, folder)
    asked = [(name, text) for text in TEXTS * 3 for name in models]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = list(
            threads.map(lambda one: client.post("/classify", json={"model": one[0], "input": one[1]}).json(), asked)
        )
    for (name, text), answer in zip(asked, answers, strict=True):
        assert "data" in answer, answer
        (found,) = answer["data"]
        expected = own(models[name], tokenizer, text).softmax(dim=0)
        assert torch.allclose(torch.tensor(found["probs"], dtype=torch.float64), expected, atol=TOLERANCE)
        assert found["label"] == ("good", "bad", "ugly")[int(expected.argmax())]
        assert (answer["object"], answer["model"], found["num_classes"]) == ("list", name, 3)
        assert answer["usage"]["prompt_tokens"] == len(tokenizer(text)["input_ids"])


def test_texts_of_different_tasks_share_a_pass(client: Any) -> None:
    """A request of many texts waits in the engine, so that its texts run together."""
    before = client.steps()
    answer = client.post("/classify", json={"model": "tiny", "input": ["one", "two"] * 32, "use_activation": False})
    assert len(answer.json()["data"]) == 64
    assert 2 <= client.steps() - before <= 8


def test_a_task_that_overflows_fails_alone(client: httpx.Client) -> None:
    names = ["tiny", "broken", "topic", "mood"] * 8
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: client.post("/classify", json={"model": name, "input": "a"}), names))
    for name, answer in zip(names, answers, strict=True):
        assert answer.status_code == (500 if name == "broken" else 200)
        assert ("inf or nan" in answer.text) == (name == "broken")


@cases(__file__, "refused")
def test_what_cannot_be_answered_is_refused_by_name(
    client: httpx.Client, path: str, send: dict[str, Any], status: int, says: str
) -> None:
    answer = client.post(path, json={"model": "tiny", **send})
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


@pytest.mark.parametrize("problem", [None, "regression"])
def test_pairs_are_scored_and_ranked_as_the_model_scores_them(tiny: Path, tmp_path: Path, problem: str | None) -> None:
    """A BERT with one label, whose tokenizer marks the second text of a pair."""
    path = save(
        tmp_path / "ranker", tiny, "BertForSequenceClassification", num_labels=1, pad_token_id=0, problem_type=problem
    )
    coder = AutoTokenizer.from_pretrained(path, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    coder.save_pretrained(path)
    model = rounded_model(path, kind=AutoModelForSequenceClassification)
    documents = TEXTS[:3]
    expected = torch.cat([own(model, coder, "a pump", document) for document in documents])
    if problem is None:
        expected = expected.sigmoid()
    for client in client_of(path, {}):
        scored = client.post("/v1/score", json={"model": "tiny", "text_1": "a pump", "text_2": documents}).json()
        found = torch.tensor([one["score"] for one in scored["data"]], dtype=torch.float64)
        assert torch.allclose(found, expected, atol=TOLERANCE)
        pairs = client.post("/score", json={"model": "tiny", "queries": ["a pump"] * 3, "documents": documents}).json()[
            "data"
        ]
        assert [one["score"] for one in pairs] == pytest.approx(found.tolist(), abs=TOLERANCE)
        ranked = client.post(
            "/v2/rerank", json={"model": "tiny", "query": "a pump", "documents": documents, "top_n": 2}
        ).json()["results"]
        order = sorted(range(3), key=lambda index: -float(expected[index]))[:2]
        assert [(one["index"], one["document"]["text"]) for one in ranked] == [(i, documents[i]) for i in order]


def test_options_of_models_that_generate_are_refused(classifier: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(classifier, tmp_path / "copy")
    for options in (Serving(draft="prompt"), Serving(tinker=tmp_path)):
        with (
            pytest.raises(ConfigError, match="this model classifies texts and generates none; leave out --"),
            serving.opened(folder, RemoteConfig(masking="simulate"), name="x", adapters={}, options=options),
        ):
            pass
