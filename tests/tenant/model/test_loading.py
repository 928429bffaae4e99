"""Folders from other parties override nothing, run no code, and no missing tensor is made up."""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
)
from transformers.models.albert import modeling_albert
from typer.testing import CliRunner

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery import known_values
from symbiosis_priv.checkpoints.vetting import QUANT_METHOD
from symbiosis_priv.errors import CheckpointError, SymbiosisError, UnsupportedModelError
from symbiosis_priv.harness.base_model import private_text
from tenant import DiffPruningConfig, MaskBertConfig, RemoteConfig
from tenant.cli import app as cli
from tenant.masking.backend import Backend
from tenant.model import adapter_limits
from tenant.model.connect import open_backend
from tenant.model.loading import load_adapter, load_model, load_tokenizer
from tenant.tasks import Tasks
from tests.adapters import peft_config
from tests.cases import cases
from tests.compatibility.families import build
from tests.tenant.scripted import ScriptedProvider

Patch = pytest.MonkeyPatch

IDS = torch.arange(1, 21).view(2, 10)
SIMULATE = RemoteConfig(masking="simulate")
Hostile = Callable[..., Path]


def add_entries(file: Path, entries: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | entries))


@pytest.fixture
def hostile(llama: Path, tmp_path: Path) -> Hostile:
    """`hostile(**entries)`: a copy of the Llama with further entries in config.json."""

    def write(folder: str = "hostile", **entries: Any) -> Path:
        path = tmp_path / folder
        shutil.copytree(llama, path)
        add_entries(path / "config.json", entries)
        return path

    return write


# A folder's entries about masking and verification


@pytest.fixture
def plaintext(federation: Path, llama: Path, tmp_path: Path) -> dict[str, Any]:
    """An attacker's configuration: no masks, the attacker's keys."""
    evil = {"masking": "none", "federation": str(federation), "cache": str(tmp_path / "evil")}
    return {"quant_method": QUANT_METHOD, "checkpoint": str(llama), **evil}


@dataclass(frozen=True)
class Place:
    """A hostile folder, the options of a caller, and what they are made of."""

    hostile: Path
    remote: RemoteConfig | None
    plaintext: dict[str, Any]
    llama: Path
    tmp_path: Path

    def load(self, kind: Any = AutoModelForCausalLM, *path: Path, **options: Any) -> None:
        quantised = {} if self.remote is None else {"quantization_config": self.remote}
        kind.from_pretrained(*(path or (self.hostile,)), **quantised | options)

    def from_cache(self, revision: str | None) -> None:
        """Load the folder by a name of the hub."""
        repository, commit = self.tmp_path / "hub" / "models--evil--model", 40 * "a"
        shutil.copytree(self.hostile, repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        self.load(AutoModelForCausalLM, Path("evil/model"), cache_dir=self.tmp_path / "hub", revision=revision)

    def as_base_model(self, kind: Any) -> None:
        """transformers and PEFT load the model that `base_model_name_or_path` names."""
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
        adapted: Any = peft.get_peft_model(load_model(self.llama), lora)
        adapted.peft_config["default"].base_model_name_or_path = str(self.hostile)
        adapted.save_pretrained(str(self.tmp_path / "adapter"))
        self.load(kind, self.tmp_path / "adapter")

    def as_object(self, config: Any) -> None:
        config.quantization_config = self.plaintext
        self.load(AutoModelForCausalLM, self.llama, config=config)

    def inside(self) -> None:
        config: Any = Gemma3Config()
        config.text_config.quantization_config = self.plaintext
        self.load(Gemma3ForConditionalGeneration, self.llama, config=config)


WAYS: dict[str, Callable[[Place], None]] = {
    "causal": Place.load,
    "base": lambda place: place.load(AutoModel),
    "its own class": lambda place: place.load(LlamaForCausalLM),
    "classifier": lambda place: place.load(AutoModelForSequenceClassification),
    "subfolder": lambda place: place.load(AutoModelForCausalLM, place.tmp_path, subfolder=place.hostile.name),
    "hub": lambda place: place.from_cache(None),
    "branch": lambda place: place.from_cache("main"),
    "commit": lambda place: place.from_cache(40 * "a"),
    "adapter": lambda place: place.as_base_model(AutoModelForCausalLM),
    "PEFT's adapter": lambda place: place.as_base_model(peft.AutoPeftModelForCausalLM),
    "object": lambda place: place.as_object(AutoConfig.from_pretrained(place.llama)),
    "inside an object": Place.inside,
    "dictionary": lambda place: place.load(AutoModelForCausalLM, place.llama, quantization_config=place.plaintext),
}


@pytest.mark.parametrize("masking", ["pad", None])
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_cannot_turn_masking_off(
    way: str, masking: str | None, hostile: Hostile, federation: Path, plaintext: dict[str, Any], llama: Path,
    executor: ScriptedProvider, helper: ScriptedProvider, tmp_path: Path,
) -> None:  # fmt: skip
    remote = None if masking is None else RemoteConfig(masking=masking, federation=federation)
    place = Place(hostile(quantization_config=plaintext), remote, plaintext, llama, tmp_path)
    with pytest.raises(CheckpointError, match="does not decide"):
        WAYS[way](place)
    assert executor.hellos == helper.hellos == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("unknown", [False, True])
def test_a_nested_configuration_is_refused_by_name(
    unknown: bool, hostile: Hostile, federation: Path, plaintext: dict[str, Any], executor: ScriptedProvider
) -> None:
    """The configuration is also refused behind an entry that transformers ignores."""
    outer = {"quantization_config": {"quant_method": "unheard of"}} if unknown else {}
    path = hostile(**outer, audio_config={"model_type": "llama", "quantization_config": plaintext})
    remote = RemoteConfig(federation=federation)
    for load in (
        lambda: AutoModelForCausalLM.from_pretrained(path, quantization_config=remote),
        lambda: load_model(path),
    ):
        with pytest.raises(SymbiosisError, match=str(path)):
            load()
    assert executor.hellos == []


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_no_kernel_is_fetched_for_a_folder(key: str, hostile: Hostile, federation: Path) -> None:
    """transformers would fetch it while it builds the model."""
    remote = RemoteConfig(federation=federation)
    with pytest.raises(CheckpointError, match=r"fetch(ed)? and run"):
        AutoModelForCausalLM.from_pretrained(hostile(**{key: "somebody/kernel"}), quantization_config=remote)


def test_a_model_that_takes_too_long_to_build_is_refused_before_it_is_built(tmp_path: Path, monkeypatch: Patch) -> None:
    built = 0

    class Counted(modeling_albert.AlbertLayerGroup):
        def __init__(self, config: Any) -> None:
            nonlocal built
            built += 1
            super().__init__(config)

    build("AlbertForMaskedLM").save_pretrained(tmp_path)
    add_entries(tmp_path / "config.json", {"num_hidden_groups": 100})
    monkeypatch.setattr(modeling_albert, "AlbertLayerGroup", Counted)
    monkeypatch.setattr(known_values, "_BUDGET", 1000)
    with pytest.raises(UnsupportedModelError, match="too many operations"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, quantization_config=SIMULATE)
    assert 0 < built < 100


def test_saved_files_do_not_contain_the_masking_options(llama: Path, federation: Path, tmp_path: Path) -> None:
    remote = RemoteConfig(federation=federation, cache=tmp_path / "private-cache")
    model: Any = AutoModelForCausalLM.from_pretrained(llama, quantization_config=remote)
    model.config.save_pretrained(tmp_path / "config")
    peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(str(tmp_path / "adapter"))
    for folder in ("config", "adapter"):
        for file in (tmp_path / folder).iterdir():
            content = file.read_bytes()
            for secret in (b"quantization_config", b"private-cache", str(federation).encode(), QUANT_METHOD.encode()):
                assert secret not in content, file
    assert "quantization_config" not in model.config.to_json_string() + str(model.config.to_dict())
    again = AutoModelForCausalLM.from_pretrained(llama, config=model.config, quantization_config=remote)
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_only_the_files_that_the_keys_are_made_from_are_loaded(llama: Path, federation: Path, tmp_path: Path) -> None:
    path = tmp_path / "variants"
    shutil.copytree(llama, path)
    shutil.copy(path / "model.safetensors", path / "model.other.safetensors")
    remote = RemoteConfig(federation=federation)
    with pytest.raises(CheckpointError, match=r"loads model\.other\.safetensors .* without .variant"):
        AutoModelForCausalLM.from_pretrained(path, variant="other", quantization_config=remote)
    with Checkpoint(llama) as checkpoint:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    config = AutoConfig.from_pretrained(llama)
    with pytest.raises(CheckpointError, match="not from a state_dict"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors, quantization_config=remote)


@pytest.mark.parametrize("variant", [None, "other"])
@pytest.mark.parametrize("where", ["inner", "inner/../elsewhere", "absolute"])
def test_an_index_cannot_point_to_another_folder(
    variant: str | None, where: str, llama: Path, federation: Path, executor: ScriptedProvider, tmp_path: Path
) -> None:
    """Otherwise the folder with the tensors would be checked, but its config.json would not be read."""
    outer = tmp_path / "outer"
    target = {"inner": outer / "inner", "inner/../elsewhere": outer / "elsewhere", "absolute": tmp_path / "far"}[where]
    for folder in (outer / "inner", target):
        shutil.copytree(llama, folder, dirs_exist_ok=True)
    config = json.loads((llama / "config.json").read_bytes())
    (outer / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with Checkpoint(llama) as checkpoint:
        prefix = str(target) if where == "absolute" else where
        weight_map = dict.fromkeys(checkpoint.names(), f"{prefix}/model.safetensors")
    name = "model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
    (outer / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for remote in (SIMULATE, RemoteConfig(federation=federation)):
        with pytest.raises(CheckpointError, match="outside its folder"):
            AutoModelForCausalLM.from_pretrained(outer, variant=variant, quantization_config=remote)
    assert executor.hellos == []


def test_config_json_cannot_point_to_another_folder(hostile: Hostile, llama: Path) -> None:
    path = hostile(transformers_weights="inner/model.safetensors")
    shutil.copytree(llama, path / "inner")
    with pytest.raises(CheckpointError, match="transformers_weights"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=SIMULATE)


def test_files_that_are_replaced_during_loading_are_refused(hostile: Hostile, monkeypatch: Patch) -> None:
    """The files that are checked are the files that are loaded."""
    path = hostile()

    def open_and_swap(remote: RemoteConfig, folder: Path) -> Backend:
        backend = open_backend(remote, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return backend

    monkeypatch.setattr("tenant.model.hf.open_backend", open_and_swap)
    with pytest.raises(CheckpointError, match="changed while"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=SIMULATE)


# Code in a folder


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once code of the checkpoint has run."""
    return tmp_path / "ran"


@pytest.fixture
def custom(hostile: Hostile, marker: Path) -> Path:
    """A checkpoint with its own model type, and code for everything."""
    classes = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoModel": "code.M"}
    path = hostile(model_type="unheard-of", auto_map=classes)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["code.T", "code.T"]}})
    )
    (path / "custom_generate").mkdir()
    for name in ("code.py", "custom_generate/generate.py"):
        (path / name).write_text(f"open({str(marker)!r}, 'w').close()\nclass C: pass\nM = T = C\n")
    return path


@pytest.mark.parametrize("answer", ["y\n", "yes\n", ""])
def test_the_commands_run_no_code_of_a_checkpoint(
    answer: str, custom: Path, marker: Path, federation: Path, tmp_path: Path
) -> None:
    """transformers would ask `[y/N]` on the terminal."""
    (tmp_path / "text").write_text("one\n\ntwo")
    model, text = ("--model", str(custom)), ("--text", str(tmp_path / "text"))
    where = (*model, "--federation", str(federation))
    for command in (
        ("check", *model, *text),
        ("generate", *where, "--prompt", "a"),
        ("finetune", *where, *text, "--output", str(tmp_path / "out")),
        ("prepare", *where),
    ):
        result = CliRunner().invoke(cli.app, command, input=answer)
        assert isinstance(result.exception, SymbiosisError), result.output
        assert "[y/N]" not in result.output
    for load in (load_model, load_tokenizer):
        with pytest.raises(SymbiosisError):
            load(custom)
    assert not marker.exists()


def test_custom_generation_is_not_loaded(hostile: Hostile, marker: Path) -> None:
    path = hostile()
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(f"open({str(marker)!r}, 'w').close()")
    load_model(path)
    assert not marker.exists()


# Names in a folder that the hub would resolve


def test_the_hub_gets_no_request_about_local_folders(
    hostile: Hostile, federation: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    asked: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        raise socket.gaierror("no network in tests")

    path = hostile(auto_map={"AutoModelForCausalLM": "evil/code--code.M"}, _name_or_path="evil/model")
    (path / "generation_config.json").write_text(json.dumps({"penalty_alpha": 0.6, "top_k": 4}))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil/code--code.T", None]}})
    )
    adapter = tmp_path / "adapter"
    peft.get_peft_model(
        load_model(path), peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    ).save_pretrained(str(adapter))
    config = json.loads((adapter / "adapter_config.json").read_bytes())
    elsewhere = {"base_model_name_or_path": "evil/model", "revision": "evil"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | elsewhere))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    load_adapter(load_model(path, remote=RemoteConfig(federation=federation, cache=tmp_path / "cache")), adapter)
    with pytest.raises(SymbiosisError):
        load_tokenizer(path)
    assert asked == []


T = ["q_proj", "v_proj"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's warnings about seeds and about saving without a base model
@cases(__file__, "overstated")
def test_an_adapters_memory_is_limited_by_its_tensors(
    honest: dict[str, Any], change: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    """The adapter's tensors are small, but its configuration states sizes of gigabytes."""
    adapted: Any = peft.get_peft_model(load_model(llama), peft_config(**honest)).eval()
    adapted.save_pretrained(str(tmp_path))
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        assert torch.equal(load_adapter(load_model(llama), tmp_path)(input_ids=IDS).logits, expected)
    add_entries(tmp_path / "adapter_config.json", change)
    model = load_model(llama)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="adapter_config"):
        load_adapter(model, tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 16  # KiB


def test_tensors_that_peft_makes_and_drops_do_not_add_up(llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """PEFT makes every tensor of GLoRA and moves it to the meta device. The allocator keeps most of what is freed."""
    monkeypatch.setattr(adapter_limits, "_SPARE_BYTES", 32 << 20)
    adapted: Any = peft.get_peft_model(load_model(llama), peft.GloraConfig(target_modules="all-linear"))
    adapted.save_pretrained(str(tmp_path))
    add_entries(tmp_path / "adapter_config.json", {"r": 1 << 16})
    model = load_model(llama)
    before = resident()
    with pytest.raises(CheckpointError, match="does not fit"):
        load_adapter(model, tmp_path)
    assert resident() - before < 128 << 20


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Hostile:
    """`adapter(**entries)`: a LoRA on all q_proj and v_proj, with further entries in adapter_config.json."""

    def write(**entries: Any) -> Path:
        torch.manual_seed(4)
        lora: Any = peft.get_peft_model(
            load_model(llama), peft.LoraConfig(r=4, target_modules=T, init_lora_weights=False)
        )
        lora.save_pretrained(str(tmp_path / "adapter"))
        add_entries(tmp_path / "adapter" / "adapter_config.json", entries)
        return tmp_path / "adapter"

    return write


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose q_proj has a bias."""
    folder = tmp_path_factory.mktemp("biased")
    build("Qwen2ForCausalLM").save_pretrained(folder)
    return folder


@cases(__file__, "replaces")
def test_an_adapter_replaces_no_tensor_of_the_base_model(
    key: str, config: dict[str, Any], biased: Path, tmp_path: Path
) -> None:
    """PEFT would load it into the base model, where it outlives the adapter. A copy of the tensor is harmless."""
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], **config)
    adapted: Any = peft.get_peft_model(load_model(biased), lora)
    adapted.save_pretrained(str(tmp_path))
    stored = dict(adapted.named_parameters(remove_duplicate=False))[f"base_model.model.{key}"].detach()
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    model = load_model(biased, remote=SIMULATE)
    before = model(IDS).logits
    save_file(tensors | {f"base_model.model.{key}": stored + 1}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="replace"):
        load_adapter(model, tmp_path)
    tasks = Tasks(model)
    tasks.register("hostile", tmp_path)
    with pytest.raises(CheckpointError, match="replace"):
        tasks.load("hostile")
    assert torch.equal(model(IDS).logits, before)
    save_file(tensors | {f"base_model.model.{key}": stored.clone()}, file, metadata={"format": "pt"})
    load_adapter(model, tmp_path)


DAMAGED: dict[str, tuple[peft.PeftConfig, dict[str, Any], str, Callable[[Tensor], Tensor]]] = {
    "places outside": (DiffPruningConfig(target_modules=T), {}, "places", lambda places: places + (1 << 20)),
    "places twice": (DiffPruningConfig(target_modules=T), {}, "places", lambda places: places * 0),
    "places below": (MaskBertConfig(target_modules=T), {}, "places", lambda places: places - (1 << 20)),
    "a dense change": (DiffPruningConfig(target_modules=T), {"density": 1.0}, "places", lambda places: places),
    "masks to train": (MaskBertConfig(target_modules=T), {"learn_masks": True}, "places", lambda places: places),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about saving without a base model
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_sparse_adapter_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    config, entries, tensor, change = DAMAGED[name]
    made: Any = peft.get_peft_model(load_model(llama), copy.deepcopy(config))
    made.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    add_entries(tmp_path / "adapter_config.json", entries)
    save_file({n: change(t) if n.endswith(tensor) else t for n, t in load_file(file).items()}, file)

    def use() -> None:
        model = load_model(llama, remote=SIMULATE)
        load_adapter(model, tmp_path)(input_ids=IDS)

    with pytest.raises(SymbiosisError):
        use()


@cases(__file__, "slow")
def test_an_entry_of_an_adapter_does_not_hang_the_load(
    entries: dict[str, Any], adapter: Hostile, llama: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(adapter_limits, "_PATIENCE_S", 0.5)
    path = adapter(**entries)
    model = load_model(llama)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json|iterations"):
        load_adapter(model, path)
    assert time.monotonic() - start < 20


# Missing tensors


@cases(__file__, "incomplete")
def test_an_adapter_that_lacks_tensors_is_refused_and_not_made_up(
    entries: dict[str, Any], adapter: Hostile, llama: Path
) -> None:
    """PEFT only warns, and leaves the tensors without values: memory that was never written would enter the rows."""
    folder = adapter(**entries)
    model = load_model(llama, remote=SIMULATE)
    with pytest.raises(CheckpointError, match=r"it lacks|is not complete: .* lacks"):
        load_adapter(model, folder)
    tasks = Tasks(model)
    tasks.register("incomplete", folder)
    with pytest.raises(CheckpointError, match=r"it lacks|is not complete: .* lacks"):
        tasks.load("incomplete")
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_missing_tensors_are_an_error_and_not_random(hostile: Hostile, llama: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"not a complete LlamaForSequenceClassification: score\.weight would be random"
    ):
        load_model(llama, kind=AutoModelForSequenceClassification, remote=SIMULATE)
    with pytest.raises(CheckpointError, match="cannot be loaded as AutoModelForCausalLM"):
        load_model(hostile(hidden_size=65), remote=None)


@pytest.mark.parametrize("config", [LlamaConfig, BertConfig, GPT2Config, T5Config, RobertaConfig])
def test_a_checkpoint_without_a_tokenizer_is_an_error(config: Any, tmp_path: Path) -> None:
    """Without files, transformers makes some tokenizers of special tokens only."""
    config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("words", ["ACGT", ["go", "stop"], ["\N{LOWER ONE EIGHTH BLOCK}a"]])
def test_a_tokenizer_need_not_know_english(words: Any, tmp_path: Path) -> None:
    """Vocabularies of proteins, genomes, molecules or games."""
    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    own = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>").save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)(words[0])["input_ids"] == [1]


# Models that predict no next token


@pytest.fixture(scope="module")
def tokenized(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tokenized(model)`: a checkpoint with the demo's tokenizer, and a private text."""

    def write(model: PreTrainedModel) -> Path:
        path = tmp_path_factory.mktemp(type(model).__name__)
        model.save_pretrained(path)
        for file in tiny.glob("*token*"):
            shutil.copy(file, path)
        (path / "notes.text").write_text("\n\n".join(private_text(seed=0, records=20)))
        return path

    return write


@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "LlamaForSequenceClassification", "T5ForConditionalGeneration"]
)
def test_an_encoder_is_measured_by_its_hidden_states_and_not_given_a_random_head(
    name: str, tokenized: Callable[..., Path], federation: Path, executor: ScriptedProvider, tmp_path: Path
) -> None:
    path = tokenized(build(name, vocab_size=320, pad_token_id=0, max_position_embeddings=512))
    text = ("--text", str(path / "notes.text"))
    check = CliRunner().invoke(
        cli.app, ["check", "--model", str(path), *text, "--sequence-length", "16", "--blocks", "2"]
    )
    assert check.exception is None, check.exception
    assert "perplexity" not in check.output
    (line,) = [line for line in check.output.splitlines() if "smallest cosine of hidden states" in line]
    assert float(line.split()[-2]) > 0.999  # the ring's cosine; bf16's is the last one
    where = ("--model", str(path), "--federation", str(federation))
    for command in (
        ("finetune", *where, *text, "--output", str(tmp_path / "out")),
        ("generate", *where, "--prompt", "a"),
    ):
        error = CliRunner().invoke(cli.app, command).exception
        assert isinstance(error, UnsupportedModelError), error
        assert f"{name}, which does not predict the next token" in str(error)
    assert executor.hellos == []
