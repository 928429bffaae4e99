"""Runs that end early lose nothing that can be saved. Simulated arithmetic; `test_cli.py` uses real providers."""

import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, Trainer

from symbiosis_priv.errors import CheckpointError, ConfigError, FinishedError, StorageError
from symbiosis_priv.harness.base_model import private_text
from tenant.model.hf import RemoteConfig
from tenant.model.loading import load_adapter, load_model
from tenant.training.finetune import FineTuned, finetune
from tenant.training.options import FineTuning, check_installed
from tenant.training.output import claimed, last_checkpoint
from tenant.training.trainer import Progress
from tests.cases import cases
from tests.compatibility.families import build
from tests.warm import Popen

OPTIONS = FineTuning(steps=5, batch_size=2, sequence_length=16, rank=4, dropout=0.2, learning_rate=1e-2, save_every=2)
SIMULATE = RemoteConfig(masking="simulate")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finetune") / "notes.txt"
    path.write_text("\n\n".join(private_text(seed=0, records=6)))
    return path


Run = Callable[..., FineTuned]


@pytest.fixture
def run(tiny: Path, text: Path) -> Run:
    def run(output: Path, *, at: int | None = None, event: Callable[[], None] = lambda: None, **changes: Any) -> Any:
        """`event` is called when step `at` is logged."""

        def progress(step: Progress) -> None:
            assert step.seconds > 0
            assert step.tokens > 0
            if step.done == at:
                event()

        options = replace(OPTIONS, **changes)
        return finetune(tiny, text, output, remote=SIMULATE, options=options, on_progress=progress)

    return run


@pytest.fixture(scope="module")
def whole(tiny: Path, text: Path) -> Path:
    """An adapter from an uninterrupted run."""
    output = text.parent / "whole"
    finetune(tiny, text, output, remote=SIMULATE, options=OPTIONS)
    return output


def tensors(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def equal(first: Path, second: Path) -> bool:
    a, b = tensors(first), tensors(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class LostError(Exception):
    """Stands for any error of a session."""


def lose() -> None:
    raise LostError


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_run_in_one_folder_is_refused(run: Run, tmp_path: Path) -> None:
    def again() -> None:
        with pytest.raises(ConfigError, match="another run uses"):
            run(tmp_path / "adapter")

    run(tmp_path / "adapter", at=1, event=again, steps=1)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        run(tmp_path / "file" / "adapter")
    with claimed(tmp_path / "new"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("step", "event", "kind"), [(1, interrupt, SystemExit), (3, lose, LostError)], ids=["a signal", "an error"]
)
def test_a_resumed_run_gives_the_same_bits(
    step: int, event: Callable[[], None], kind: type[BaseException], run: Run, whole: Path, tmp_path: Path
) -> None:
    """The run has dropout, and ends in the middle of an epoch, between two regular checkpoints."""
    output = tmp_path / "adapter"
    with pytest.raises(kind) as raised:
        run(output, at=step, event=event)
    assert raised.value.__notes__ == [
        f"saved: {output}, after step {step} of 5; the same command with --resume continues"
    ]
    assert last_checkpoint(output).name == f"checkpoint-{step}"
    assert equal(output, last_checkpoint(output))
    assert not equal(output, whole)
    run(output, resume=True)
    assert equal(output, whole)


def test_a_step_that_fails_half_way_leaves_no_trace(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward pass has drawn random numbers for dropout."""
    step, calls = Trainer.training_step, []

    def failing(self: Trainer, *inputs: Any) -> torch.Tensor:
        loss = step(self, *inputs)
        calls.append(loss)
        if len(calls) == 4:
            raise LostError
        return loss

    monkeypatch.setattr(Trainer, "training_step", failing)
    with pytest.raises(LostError):
        run(tmp_path / "adapter")
    run(tmp_path / "adapter", resume=True)
    assert equal(tmp_path / "adapter", whole)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond `room` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_last_complete_checkpoint(run: Run, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "adapter"
    with ExitStack() as full, pytest.raises(StorageError, match=r"checkpoint-4.*make room") as raised:
        run(output, at=3, event=lambda: full.enter_context(full_disk(1000)))
    saved = output / "checkpoint-2"
    assert raised.value.__notes__ == [
        f"saved before: {saved}; free some disk space, then the same command with --resume continues from it"
    ]
    assert list(output.glob("checkpoint-*")) == [saved]
    assert equal(output, saved)
    run(output, resume=True)
    assert equal(output, whole)


@pytest.fixture(scope="module")
def begun(tiny: Path, text: Path) -> Path:
    """The output folder of a run with one step."""
    output = text.parent / "begun"
    finetune(tiny, text, output, remote=SIMULATE, options=replace(OPTIONS, steps=1))
    return output


def test_a_full_disk_is_found_before_the_first_step(run: Run, begun: Path, tmp_path: Path) -> None:
    adapter = 4096 + sum(t.nbytes for t in tensors(begun).values())
    with full_disk(adapter), pytest.raises(StorageError, match="make room") as raised:
        run(tmp_path / "adapter", at=1, event=pytest.fail)
    assert not hasattr(raised.value, "__notes__")
    assert not (tmp_path / "adapter").exists()


def test_a_resumed_run_uses_the_options_of_its_start(
    run: Run, begun: Path, tmp_path: Path, text: Path, tiny: Path
) -> None:
    output = Path(shutil.copytree(begun, tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"rank 4, now 8, alpha 8, now 16, learning rate 0.01, now 0.1"):
        run(output, resume=True, rank=8, learning_rate=0.1)
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    with pytest.raises(ConfigError, match="other data"):
        finetune(tiny, other, output, remote=SIMULATE, options=replace(OPTIONS, resume=True))
    assert len(run(output, resume=True, steps=2, gradient_checkpointing=True).progress.losses) == 1


def _changed_adapter(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(checkpoint: Path) -> None:
        found = tensors(checkpoint)
        change(found)
        save_file(found, checkpoint / "adapter_model.safetensors", metadata={"format": "pt"})

    return write


def _say(checkpoint: Path, **entries: object) -> None:
    path = checkpoint / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


class Evil:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _plant_code(checkpoint: Path) -> None:
    torch.save({"state": Evil(checkpoint.parent / "ran")}, checkpoint / "optimizer.pt")


_HOSTILE: dict[str, Callable[[Path], object]] = {
    "an optimizer that runs code": _plant_code,
    "no scheduler": lambda checkpoint: (checkpoint / "scheduler.pt").unlink(),
    "a norm of the base model": _changed_adapter(
        lambda found: found.update({"base_model.model.model.norm.weight": torch.zeros(64)})
    ),
    "an adapter without one of its tensors": _changed_adapter(lambda found: found.pop(min(found))),
    "a state of another type": lambda checkpoint: (checkpoint / "trainer_state.json").write_text("[]"),
    "a state of another step": lambda checkpoint: _say(checkpoint, global_step=10**6),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_checkpoint_is_not_resumed(name: str, run: Run, begun: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(begun, tmp_path / "adapter"))
    _HOSTILE[name](last_checkpoint(output))
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        run(output, resume=True, steps=2)
    assert not (output / "ran").exists()
    if name == "an optimizer that runs code":  # otherwise this test would prove nothing
        torch.load(output / "checkpoint-1" / "optimizer.pt", weights_only=False)
        assert (output / "ran").exists()


def test_a_checkpoint_loads_nothing_beside_the_adapter(run: Run, begun: Path, tmp_path: Path) -> None:
    honest, hostile = (Path(shutil.copytree(begun, tmp_path / name)) for name in ("honest", "hostile"))
    checkpoint = last_checkpoint(hostile)
    # Trainer loads adapters in subfolders, with the configurations that lie there
    second = Path(shutil.copytree(checkpoint, checkpoint / "second")) / "adapter_config.json"
    second.write_text(json.dumps(json.loads(second.read_text()) | {"target_modules": 3, "r": 10**12}))
    # it loads this file into the model, and then no adapter
    embeddings = {"base_model.model.model.embed_tokens.weight": torch.zeros(320, 64)}
    save_file(embeddings, checkpoint / "model.safetensors", metadata={"format": "pt"})
    for output in (honest, hostile):
        run(output, resume=True, steps=2)
    assert equal(honest, hostile)


def test_pairs_of_unequal_length_are_padded(run: Run, tiny: Path, tmp_path: Path) -> None:
    lines = tmp_path / "pairs.jsonl"
    lines.write_text(
        '{"prompt": "2+2=", "completion": "4"}\n{"prompt": "The weather is", "completion": " fine, and"}\n'
    )
    options = replace(OPTIONS, steps=1, sequence_length=12, pad_to_multiple_of=13)
    result = finetune(tiny, lines, tmp_path / "adapter", remote=SIMULATE, options=options)
    assert result.progress.tokens % 13 == 0
    apart = finetune(tiny, lines, tmp_path / "apart", remote=SIMULATE, options=replace(options, batch_size=1))
    assert result.loss_before == pytest.approx(apart.loss_before, rel=1e-5)  # a mean of tokens, not of batches
    assert not result.held_out


def test_lora_has_the_chosen_options(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "adapter"
    run(output, steps=1, alpha=32, target_modules="q_proj, mlp.down_proj")
    assert {name.split(".")[-3] for name in tensors(output)} == {"q_proj", "down_proj"}
    config = (output / "adapter_config.json").read_text()
    assert '"lora_alpha": 32' in config
    assert '"lora_dropout": 0.2' in config
    with pytest.raises(ConfigError, match=r"--target-modules query, proj: .* it has down_proj, gate_proj, k_proj"):
        run(tmp_path / "other", target_modules="q_proj,query,proj")


def test_trackers_are_checked_before_loading(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--report-to nobody: .*not supported, only .*tensorboard.*wandb"):
        run(tmp_path / "adapter", report_to=("nobody",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"--report-to wandb: .*pip install wandb"):
        run(tmp_path / "adapter", report_to=("wandb",))
    assert not (tmp_path / "adapter").exists()


@cases(__file__, "architectures")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
def test_an_adapter_of_another_architecture_is_refused(
    config: dict[str, Any], target: str, tiny: Path, tmp_path: Path
) -> None:
    made = AutoConfig.from_pretrained(tiny, **config) if target == "down_proj" else GPT2Config(n_layer=1, **config)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=[target], r=2)
    get_peft_model(AutoModelForCausalLM.from_config(made), lora).save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(CheckpointError, match=r"(does not fit|is not complete).*load the base model") as raised:
        load_adapter(load_model(tiny, remote=SIMULATE), tmp_path / "adapter")
    assert len(str(raised.value)) < 800  # not every tensor's name


def test_a_run_that_was_killed_continues_with_the_same_bits(
    tiny: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    """SIGKILL in the fourth step: from the checkpoint after the second one."""
    program = f"""
import os
from pathlib import Path
from tenant.model.hf import RemoteConfig
from tenant.training.finetune import finetune
from tenant.training.options import FineTuning
finetune(
    Path({str(tiny)!r}),
    Path({str(text)!r}),
    Path({str(tmp_path / "adapter")!r}),
    remote=RemoteConfig(masking="simulate"),
    options={OPTIONS!r},
    on_progress=lambda step: os.kill(os.getpid(), 9) if step.done == 3 else None,
)
"""
    with Popen([sys.executable, "-c", program]) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert last_checkpoint(tmp_path / "adapter").name == "checkpoint-2"
    assert equal(tmp_path / "adapter", tmp_path / "adapter" / "checkpoint-2")
    finetune(tiny, text, tmp_path / "adapter", remote=SIMULATE, options=replace(OPTIONS, resume=True))
    assert equal(tmp_path / "adapter", whole)


def test_a_run_that_ends_before_its_first_step_says_what_is_saved(
    run: Run, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda *_, **__: lose())
    output = Path(shutil.copytree(begun, tmp_path / "adapter"))
    for folder, resume, note in (
        (output, True, "saved before: .*checkpoint-1; "),
        (tmp_path / "new", False, "nothing"),
    ):
        with pytest.raises(LostError) as raised:
            run(folder, resume=resume, steps=2)
        assert re.match(note, raised.value.__notes__[0])


def test_a_finished_run_says_so_and_changes_nothing(run: Run, begun: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(begun, tmp_path / "adapter"))
    for options in ({"steps": 1}, {"steps": None, "epochs": 0.01}):
        with pytest.raises(FinishedError, match=r"^finished: .*, after step 1 of 1; "):
            run(output, at=2, event=pytest.fail, resume=True, **options)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-1"]
    assert equal(output, begun)


def test_checkpoints_of_another_run_are_not_deleted(run: Run, begun: Path, tmp_path: Path) -> None:
    """A trainer deletes all checkpoints in its folder but the last one."""
    output = Path(shutil.copytree(begun, tmp_path / "adapter"))
    other = Path(shutil.copytree(output / "checkpoint-1", output / "checkpoint-0"))
    record = json.loads((other / "run.json").read_text())
    for written, message in ((json.dumps(record | {"seed": 9}), "seed 9, now 0"), (None, "run.json cannot be read")):
        (other / "run.json").write_text(written) if written else (other / "run.json").unlink()
        with pytest.raises(ConfigError, match=message):
            run(output, resume=True, steps=3)
        assert other.is_dir()


def test_packed_chats_are_learned_as_unpacked_ones(tiny: Path, tmp_path: Path) -> None:
    """No chat attends to another one in its row."""
    lines = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{'Report ' * i}{i}:", "completion": f" {2 * i}"} for i in range(8)]
    lines.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    options = replace(OPTIONS, steps=1, sequence_length=96, dropout=0.0)
    cases: dict[str, Any] = {"packed": {"batch_size": 4, "packing": True}, "apart": {"batch_size": 8}}
    packed, apart = (
        finetune(tiny, lines, tmp_path / name, remote=SIMULATE, options=replace(options, **changes))
        for name, changes in cases.items()
    )
    assert packed.progress.losses == pytest.approx(apart.progress.losses, rel=1e-6)
    assert packed.progress.tokens < apart.progress.tokens / 1.5  # no padding
    for name, tensor in tensors(tmp_path / "apart").items():
        torch.testing.assert_close(tensors(tmp_path / "packed")[name], tensor, rtol=1e-2, atol=1e-3)
    others = tmp_path / "model"
    build(
        "OPTForCausalLM", vocab_size=320, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2
    ).save_pretrained(others)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, others)
    with pytest.raises(ConfigError, match="--packing: this model reads the examples before"):
        finetune(others, lines, tmp_path / "x", remote=SIMULATE, options=FineTuning(packing=True, sequence_length=96))


def test_a_chat_template_renders_the_time_of_the_runs_start(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{{ strftime_now('%H %f') }}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    )
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n' * 4)
    for resume, steps in ((False, 1), (True, 2)):
        options = replace(OPTIONS, steps=steps, resume=resume, sequence_length=64)
        made = finetune(model, data, tmp_path / "adapter", remote=SIMULATE, options=options)
    assert made.progress.done == 2


def test_nothing_is_told_to_other_machines(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainers send the model's architecture to Hugging Face."""
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", pytest.fail)
    run(tmp_path / "adapter", steps=1)


def test_the_extra_is_named_if_trl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"trl is not installed; .*\[finetune\]"):
        check_installed()
