"""`from_pretrained` loads only the tenant's tensors, and refuses what cannot work."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from symbiosis_priv.checkpoints.checkpoint import Checkpoint
from symbiosis_priv.checkpoints.discovery.skeleton import architecture, load_config
from symbiosis_priv.checkpoints.weights import WeightStore
from symbiosis_priv.errors import CheckpointError, NonFiniteError, SymbiosisError, UnsupportedMethodError
from symbiosis_priv.federation import Federation
from tenant import RemoteConfig, backend_of
from tenant.model.remote_linear import RemoteLayer
from tenant.preparation.own_tensors import write_slim
from tests.adapters import peft_config
from tests.cases import cases
from tests.compatibility.families import build
from tests.splitting import split_model
from tests.tenant.conftest import Scripted, Tape
from tests.tenant.scripted import ScriptedProvider

Write = Callable[[Federation], Path]
IDS = torch.arange(1, 21).view(2, 10)
TIMEOUT_S = 20.0


Load = Callable[..., Any]


@pytest.fixture
def load() -> Iterator[Load]:
    """`split_model`, closed after the test."""
    with contextlib.ExitStack() as opened:

        def load(path: Path, **options: Any) -> Any:
            model = split_model(path, **{"dtype": "auto"} | options)
            opened.enter_context(backend_of(model))
            return model

        yield load


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_frozen_linear_is_remote_and_everything_else_is_loaded(
    load: Load, request: pytest.FixtureRequest, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path: Path = request.getfixturevalue(name)
    model = load(path)
    members = {m for entry in WeightStore(path).manifest().groups for m in entry.members}
    remote = {n for n, m in model.named_modules() if isinstance(m, RemoteLayer)}
    assert remote == members
    offloaded = {f"{n}.{kind}" for n in members for kind in ("weight", "bias")}
    state = model.state_dict()
    with Checkpoint(path) as checkpoint:
        kept = set(checkpoint.names()) - offloaded
        assert kept
        for key in kept:
            assert torch.equal(state[key], checkpoint.tensor(key))
    assert offloaded.isdisjoint(state)
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert "UNEXPECTED" not in (printed := "".join(capfd.readouterr()))
    assert "MISSING" not in printed


def test_non_finite_activations_raise_before_a_byte_is_sent(
    load: Load, llama: Path, federation: Path, tape: Tape, executor: ScriptedProvider, helper: ScriptedProvider
) -> None:
    model = load(llama, federation=federation, wiretap=tape)
    with torch.no_grad():
        model.get_input_embeddings().weight[5, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="nothing was sent"):
        model(input_ids=IDS)
    assert tape.frames == []
    assert executor.hellos == helper.hellos == []


def test_providers_see_nothing_of_gradients_that_are_not_finite(
    load: Load, llama: Path, federation: Path, tape: Tape
) -> None:
    model = load(llama, federation=federation, wiretap=tape)
    table = model.get_input_embeddings().weight.requires_grad_(True)
    sent = []
    for factor in (1.0, float("inf")):
        already = len(tape.executed())
        (model(input_ids=IDS).logits.sum() * factor).backward()
        sent.append([(message.group, message.direction, message.rows) for message, _ in tape.executed()[already:]])
    assert sent[0] == sent[1]
    assert table.grad is not None
    assert table.grad[IDS].isnan().all()


def test_offloaded_weights_count_as_parameters_but_take_no_memory(load: Load, llama: Path) -> None:
    full, split = transformers.LlamaForCausalLM.from_pretrained(llama), load(llama)
    assert split.num_parameters() == full.num_parameters()
    own = [p for n, p in split.named_parameters() if "norm" in n or "embed" in n]
    assert split.get_memory_footprint(return_buffers=False) == sum(p.nbytes for p in own)
    lora = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=4)
    counts = [peft.get_peft_model(model, lora).get_nb_trainable_parameters() for model in (full, split)]
    assert counts[0] == counts[1]


# Checkpoints


def slim(source: Path, target: Path) -> Path:
    """Write a checkpoint with the tenant's tensors only."""
    store = WeightStore(source)
    write_slim(store, store.manifest(), target)
    return target


def test_a_slim_checkpoint_needs_a_preparation_once(
    load: Load, llama: Path, federation: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, cache = slim(llama, tmp_path / "slim"), tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"nothing is prepared .*RemoteConfig\(checkpoint='FULL_CHECKPOINT'\)"):
        load(folder, federation=federation, cache=cache)
    first = load(folder, federation=federation, cache=cache, checkpoint=llama)
    again = load(folder, federation=federation, cache=cache)
    with torch.no_grad():
        reference = load(llama)(input_ids=IDS).logits
        assert torch.equal(first(input_ids=IDS).logits, reference)
        assert torch.equal(again(input_ids=IDS).logits, reference)
    assert "MISSING" not in "".join(capfd.readouterr())


def test_local_masking_and_simulation_need_the_full_checkpoint(
    load: Load, llama: Path, federation: Path, tmp_path: Path
) -> None:
    folder, cache = slim(llama, tmp_path / "slim"), tmp_path / "cache"
    load(folder, federation=federation, cache=cache, checkpoint=llama)
    with pytest.raises(CheckpointError, match=r"pass RemoteConfig\(checkpoint='FULL_CHECKPOINT'\)"):
        load(folder, federation=federation, cache=cache, masking="local")
    with pytest.raises(CheckpointError, match="is it the full base checkpoint"):
        load(folder, cache=cache)
    load(folder, cache=cache, checkpoint=llama)


def test_another_architecture_than_the_federations_is_refused(
    load: Load, llama: Path, federation: Path, tmp_path: Path
) -> None:
    """The preparation is for the Llama, the checkpoint is another model: no layer may be replaced by chance."""
    narrow = tmp_path / "narrow"
    build("LlamaForCausalLM").save_pretrained(narrow)
    with pytest.raises(CheckpointError, match="is not the checkpoint that was prepared"):
        load(narrow, federation=federation, checkpoint=llama)


def test_shards_and_subfolders_are_read_where_transformers_reads_them(load: Load, llama: Path, tmp_path: Path) -> None:
    transformers.LlamaForCausalLM.from_pretrained(llama).save_pretrained(tmp_path / "inner", max_shard_size="40KB")
    assert len(list((tmp_path / "inner").glob("*.safetensors"))) > 1
    sharded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, subfolder="inner", quantization_config=RemoteConfig(masking="simulate")
    )
    with torch.no_grad():
        assert torch.equal(sharded(input_ids=IDS).logits, load(llama)(input_ids=IDS).logits)


# Heads of tasks


CLASSIFIERS = {
    "bert": "BertForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "roberta, a head of two layers": "RobertaForSequenceClassification",
    "tokens": "Qwen3ForTokenClassification",
}


@pytest.fixture
def classifier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    sizes = {"intermediate_size": 48 + 8 * len(request.param)}  # a preparation is found by the offloaded weights
    build(CLASSIFIERS[request.param], pad_token_id=0, num_labels=3, **sizes).save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def head_of(model: Any) -> dict[str, Tensor]:
    """The tensors outside the base model."""
    prefix = model.base_model_prefix + "."
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefix)}


@pytest.mark.parametrize("classifier", CLASSIFIERS, indirect=True)
def test_a_classification_head_stays_with_the_tenant_and_is_trained(
    load: Load, classifier: Path, scripted: Scripted, federation_file: Write, tmp_path: Path
) -> None:
    """Served by real providers, which find the same groups; saved here, and loaded into a plain model."""
    kind = architecture(load_config(classifier))
    store = WeightStore(classifier)
    members = {member for entry in store.manifest().groups for member in entry.members}
    assert members
    assert all(member.startswith(kind.base_model_prefix + ".") for member in members)
    providers = [scripted.new_provider(store=store) for _ in range(2)]
    federation = federation_file(scripted.new_federation(providers[:1], providers[1:], digest=store.manifest().digest))
    task = "TOKEN_CLS" if "Token" in kind.__name__ else "SEQ_CLS"
    labels = IDS % 3 if task == "TOKEN_CLS" else torch.tensor([1, 2])
    outcomes = []
    for options in ({"federation": federation}, {"masking": "simulate"}):
        model = load(classifier, kind=kind, **options)
        stored = head_of(model)
        assert stored
        torch.manual_seed(7)
        # "all-linear" would conflict in PEFT itself with the head of a token classifier
        where: Any = "all-linear" if task == "SEQ_CLS" else ["q_proj", "down_proj"]
        lora = peft.LoraConfig(task_type=task, target_modules=where, r=4)
        adapted: Any = peft.get_peft_model(model, lora)
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        adapted.eval()(input_ids=IDS, labels=labels).loss.backward()
        optimizer.step()
        with torch.no_grad():
            outcomes.append(adapted(input_ids=IDS).logits)
    assert torch.equal(*outcomes)
    adapted.save_pretrained(tmp_path / "adapter")
    with Checkpoint(classifier) as checkpoint:
        for name, tensor in stored.items():
            assert torch.equal(tensor, checkpoint.tensor(name))
    trained = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(not torch.equal(t, stored[n]) for name, t in trained.items() for n in stored if name.endswith(n))
    home: Any = peft.PeftModel.from_pretrained(kind.from_pretrained(classifier), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert torch.nn.functional.cosine_similarity(home(input_ids=IDS).logits, outcomes[0], dim=-1).min() > 0.99


@pytest.mark.parametrize("classifier", ["bert", "llama"], indirect=True)
def test_another_number_of_labels_makes_another_head(load: Load, classifier: Path) -> None:
    kind = architecture(load_config(classifier))
    config = RemoteConfig(masking="simulate")
    model: Any = kind.from_pretrained(
        classifier, num_labels=7, ignore_mismatched_sizes=True, quantization_config=config
    )
    with torch.no_grad():
        assert model(input_ids=IDS).logits.shape == (2, 7)
    backend_of(model).close()


# Models


@pytest.mark.parametrize(
    "device_map",
    [{"": "disk"}, {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "lm_head": "cpu"}],
)
def test_layers_offloaded_to_disk_are_refused(
    load: Load, llama: Path, device_map: dict[str, str], tmp_path: Path
) -> None:
    remote = RemoteConfig(masking="simulate")
    options: dict[str, Any] = {"quantization_config": remote, "offload_folder": str(tmp_path)}
    with pytest.raises(UnsupportedMethodError, match="device_map"):
        transformers.AutoModelForCausalLM.from_pretrained(llama, device_map=device_map, **options)
    weight: Any = next(m.weight for m in load(llama).modules() if isinstance(m, RemoteLayer))
    with pytest.raises(UnsupportedMethodError, match="device_map"):  # as accelerate does it for device_map="auto"
        type(weight)(torch.empty(2, 2), requires_grad=False)


@cases(__file__, "adapter_names")
def test_adapter_names_that_peft_would_ignore_are_an_error(
    load: Load, llama: Path, config: dict[str, Any], works: bool
) -> None:
    """Otherwise every row would go through the active adapter without an error."""
    model: Any = peft.get_peft_model(load(llama), peft_config(**config)).eval()
    names = ["default", "__base__"]
    with torch.no_grad():
        model(input_ids=IDS)
        if works:
            model(input_ids=IDS, adapter_names=names)
            return
        with pytest.raises(UnsupportedMethodError, match="adapter_names"):
            model(input_ids=IDS, adapter_names=names)
        with pytest.raises((UnsupportedMethodError, ValueError), match="adapter_names"):  # or transformers' own error
            model.generate(input_ids=IDS, adapter_names=names, max_new_tokens=1)


def test_the_base_model_is_not_saved(load: Load, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        load(llama).save_pretrained(tmp_path)
    assert "base model cannot be saved here" in caplog.text


@pytest.mark.usefixtures("sockets")
def test_a_model_that_is_dropped_closes_its_connections(llama: Path, federation: Path, scripted: Scripted) -> None:
    """No call of `close` is needed. (pytest fails if a socket is garbage collected without being closed.)"""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        llama, quantization_config=RemoteConfig(federation=federation, masking="pad")
    )
    before = set(threading.enumerate())
    model(input_ids=IDS)
    started = set(threading.enumerate()) - before  # the session's connections, and the providers' ends of them
    assert len(scripted.executor.hellos) == 1
    assert len(scripted.helper.hellos) in range(2, 5)  # pads that are needed now, and pads ahead: two connections each
    assert len(started) > 3
    del model
    gc.collect()
    for thread in started:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_a_provider_of_the_wrong_model_is_named(
    load: Load, llama: Path, gpt2_store: WeightStore, scripted: Scripted, federation_file: Write
) -> None:
    federation = federation_file(scripted.new_federation([scripted.new_provider(store=gpt2_store)]))
    with pytest.raises(SymbiosisError, match="does not serve the pinned model"):
        load(llama, federation=federation, masking="none")(input_ids=IDS)
