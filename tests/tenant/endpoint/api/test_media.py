"""Pictures and sounds in chats: real architectures in miniature, and files that lie about their size."""

import base64
import contextlib
import io
import re
import struct
import threading
import wave
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.endpoint.api import media
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.engine.answer import token_logprob
from tenant.endpoint.options import Serving
from tenant.model.hf import backend_of
from tenant.model.loading import load_language_model, load_processor
from tests.cases import table
from tests.compatibility.families import build
from tests.tenant.endpoint.conftest import served_at

Image = pytest.importorskip("PIL.Image")
KEY, RATE = "sk-0123456789abcdef", 16_000
SIMULATED = RemoteConfig(masking="simulate")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% elif c.type == 'audio' %}<|audio_bos|><|AUDIO|>"
    "<|audio_eos|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"
)


def letters(**special: str) -> Any:
    """A tokenizer of bytes, with special tokens by name."""
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokens = {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=whole, extra_special_tokens=special, **tokens)


FAMILIES = table(__file__, "families")


def write(folder: Path, family: str) -> None:
    """Write a model of a family in miniature with its processor."""
    given = FAMILIES[family]
    tokens, more = given["tokens"], given.get("config", {})
    tokenizer = letters(**tokens)
    kind = "audio" if "audio_token" in tokens else "image"
    place = tokenizer.convert_tokens_to_ids(tokens[f"{kind}_token"])
    fields = vars(getattr(transformers, f"{family}Config")())
    field = next(name for name in (f"{kind}_token_index", f"{kind}_token_id") if name in fields)
    text = more.get("text_config", {}) | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    build(f"{family}ForConditionalGeneration", **more | {field: place, "text_config": text}).save_pretrained(folder)
    reader = getattr(transformers, given["reader"])(**given["settings"])
    part = {"feature_extractor" if kind == "audio" else "image_processor": reader}
    processor = getattr(transformers, f"{family.removeprefix('Vip')}Processor")
    processor(**part, **given.get("processor", {}), tokenizer=tokenizer, chat_template=TEMPLATE).save_pretrained(folder)


def png(width: int = 20, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def wav(samples: np.ndarray[Any, Any], *, rate: int = RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(-(2**15), 2**15, RATE // 2)


def picture_part(file: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(file).decode()}"}}


def input_part(part: dict[str, Any]) -> dict[str, Any]:
    """The same part of a message for `/v1/responses`."""
    return {"type": "input_image", "image_url": part["image_url"]["url"]} if "image_url" in part else part


def sound_part(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


REAL = "Llava"
"""The family that is tried with providers; the products of others are simulated."""

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of PaliGemmaProcessor


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A folder, a part of a message, what the processor takes for it, a client of an endpoint, and its engine."""
    family = request.param
    folder = tmp_path_factory.mktemp(family) / "models--owner--tiny" / "snapshots" / "0123abc"  # as on the hub
    write(folder, family)
    part: Any = picture_part(png())
    given: dict[str, Any] = {"images": [Image.open(io.BytesIO(png()))]}
    if "audio_token" in FAMILIES[family]["tokens"]:
        part = sound_part(wav(NOISE))
        given = {"audio": [(NOISE / 32768).astype(np.float32)], "sampling_rate": RATE}
    with ExitStack() as stack:
        remote = SIMULATED
        if family == REAL:
            place, threads = tmp_path_factory.mktemp("federation"), {"executor": {"threads": 1}}
            federation = stack.enter_context(LocalFederation(folder, place, provider_options=threads))
            remote = RemoteConfig(federation=federation.federation, masking="pad")
        service, address = stack.enter_context(served_at(folder, remote, key=KEY, options=Serving(media=True)))
        client = stack.enter_context(openai.OpenAI(base_url=address + "/v1", api_key=KEY, max_retries=0))
        yield folder, part, given, client, service.engine


def test_an_answer_has_the_bits_of_generate(case: Any) -> None:
    folder, part, given, client, engine = case
    processor: Any = load_processor(folder)
    kinds = {"image_url": "image", "input_audio": "audio"}
    shown = [{"type": kinds[part["type"]]}, {"type": "text", "text": "what is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": shown}], tokenize=False)
    inputs = processor(text=[text], return_tensors="pt", **given)
    model = load_language_model(folder, remote=SIMULATED, media=True)
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    backend_of(model).close()
    new = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    asked: Any = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": True}
    answer = client.chat.completions.create(messages=messages, **asked)
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]
    assert answer.choices[0].message.content == processor.tokenizer.decode(new, skip_special_tokens=True)
    expected = [token_logprob(one[0], token, top=0).logprob for one, token in zip(out.logits, new, strict=True)]
    found = [one.logprob for one in answer.choices[0].logprobs.content]
    assert found == expected[: len(found)]
    other = client.chat.completions.create(messages=[{"role": "user", "content": "what is it?"}], **asked)
    ledger = client.get(str(client.base_url.copy_with(path="/ledger")), cast_to=object)
    assert client.models.retrieve("tiny").root == ledger["model"] == "owner/tiny@0123abc"
    said: Any = [{"role": "user", "content": [input_part(part), {"type": "input_text", "text": "what is it?"}]}]
    response = client.responses.create(model="tiny", input=said, max_output_tokens=6, temperature=0)
    assert response.output_text == answer.choices[0].message.content
    rows = [one.usage.model_extra["ledger"]["rows"] for one in (answer, other)]
    assert rows[0] > rows[1] > 0 or rows == [0, 0]  # the ledger counts the rows of the picture or sound
    # texts are computed together while a picture or sound is answered
    more = {"ignore_eos": True, "stream_options": {"include_ledger": True}}  # a chunk for each token
    long: Any = asked | {"max_tokens": 100, "logprobs": None, "stream": True, "extra_body": more}
    begun = client.chat.completions.create(messages=messages, **long)
    for _ in range(3):
        next(begun)
    again = client.chat.completions.create(messages=[{"role": "user", "content": "what is it?"}], **asked)
    assert engine.load().running == 1
    assert again.choices[0].logprobs == other.choices[0].logprobs


def test_a_chat_goes_on_after_a_picture_or_sound(case: Any) -> None:
    folder, part, _, client, _ = case
    again = [] if "AudioFlamingo3" in str(folder) else [part]  # its processor takes one sound
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [part, {"type": "text", "text": "and"}, *again]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "more"},
    ]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices[0].message


@pytest.mark.parametrize("case", [REAL, "Qwen2Audio"], indirect=True)
def test_what_the_model_does_not_take_is_refused(case: Any) -> None:
    _, part, _, client, _ = case
    other = sound_part(wav(NOISE)) if part["type"] == "image_url" else picture_part(png())
    long = sound_part(wav(np.zeros(RATE + 1)))  # the extractor of this test takes a second
    wrong = [other, long, {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]
    for one in wrong:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "?"}, one]}]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        messages[0]["content"] = [{"type": "input_text", "text": "?"}, input_part(one)]
        said: Any = refused.value.body
        with pytest.raises(openai.BadRequestError, match=re.escape(said["message"])) as again:
            client.responses.create(model="tiny", input=messages, max_output_tokens=1)
        assert again.value.param == "input"
        assert (refused.value.param or "").startswith("messages.0.content.1")
    too_long: Any = [{"role": "user", "content": [part, {"type": "text", "text": "x" * 100_000}]}]
    with pytest.raises(openai.BadRequestError, match="characters"):  # before anything is processed
        client.chat.completions.create(model="tiny", messages=too_long, max_tokens=1)


@pytest.mark.parametrize("case", [REAL], indirect=True)
def test_texts_are_looked_for_outside_the_event_loop(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, part, _, client, _ = case
    threads = set[str]()

    def check(*given: Any) -> None:
        threads.add(threading.current_thread().name)
        media.check_kept(*given)

    monkeypatch.setattr("tenant.endpoint.api.routes.chat.check_kept", check)
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert {name.rpartition("_")[0] for name in threads} == {"endpoint-texts"}


def refused(decode: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(ApiError) as error:
        decode(*given, media.Media(), param="x", **more)
    return str(error.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of one row whose header says more."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_pictures_are_measured_before_they_are_decoded() -> None:
    def url(file: bytes, kind: str = "image/png") -> str:
        return str(picture_part(file, kind)["image_url"]["url"])

    for size in ((1 << 15, 1 << 15), (1 << 13, 1 << 12), ((1 << 31) - 1, 1)):
        assert "at most" in refused(media._picture, url(bomb(*size)))
    assert "32 times the other" in refused(media._picture, url(bomb(1, 1 << 20)))
    assert "no complete picture" in refused(media._picture, url(bomb(8, 8)))
    assert "no complete picture" in refused(media._picture, url(png(), "image/jpeg"))  # no format is guessed
    assert "no complete picture" in refused(media._picture, url(png()[:200]))
    for wrong in ("data:image/svg+xml;base64,AAAA", "data:image/png,AAAA", "data:image/png;base64"):
        assert "send data:TYPE;base64" in refused(media._picture, wrong)
    for address in ("http://127.0.0.1/x.png", "file:///etc/passwd", "/etc/passwd", ""):
        assert "nothing is fetched" in refused(media._picture, address)
    assert "not base64" in refused(media._picture, "data:image/png;base64,$$$")
    several = media.Media(pixels=media._PIXELS - 1)
    with pytest.raises(ApiError, match="at most"):
        media._picture(url(png()), several, param="x")


@settings(max_examples=25)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50), st.integers(1, 3))
def test_sounds_are_the_samples_of_the_file(samples: list[int], channels: int) -> None:
    values = np.repeat(np.array(samples), channels)  # the same in all channels
    data = base64.b64encode(wav(values, channels=channels)).decode()
    found = media._sound(data, media.Media(), rate=RATE, param="x")
    assert found.dtype == np.float32
    assert found.tolist() == (np.array(samples) / 32768).astype(np.float32).tolist()


def test_sounds_are_measured_before_they_are_read() -> None:
    def data(file: bytes) -> str:
        return base64.b64encode(file).decode()

    long = bytearray(wav(NOISE))
    long[40:44] = struct.pack("<I", 1 << 30)  # the size that the header states
    assert "at most" in refused(media._sound, data(bytes(long)), rate=RATE)
    assert "ffmpeg" in refused(media._sound, data(wav(NOISE, rate=8_000)), rate=RATE)
    assert "empty" in refused(media._sound, data(wav(NOISE[:0])), rate=RATE)
    for wrong in (b"", b"RIFF", wav(NOISE)[:30], png()):
        assert "no WAV file" in refused(media._sound, data(wrong), rate=RATE)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_sound_is_refused(data: st.DataObject) -> None:
    file = bytearray(wav(NOISE[:20]))
    for _ in range(data.draw(st.integers(1, 3))):
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 48), st.integers(0, 48))))
        file[begin:end] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(ApiError):
        media._sound(base64.b64encode(file).decode(), media.Media(), rate=RATE, param="x")


def test_a_sound_whose_chunks_end_after_the_file_is_refused() -> None:
    file = wav(NOISE[:20]).replace(b"WAVE", b"WAVEjunk" + struct.pack("<I", 1000))
    assert "no WAV file" in refused(media._sound, base64.b64encode(file).decode(), rate=RATE)


@pytest.mark.parametrize("kind", ["JPEG", "iCCP", "iTXt", "zTXt"])
def test_what_makes_a_small_picture_slow_is_counted(kind: str) -> None:
    """A scan of 34 bytes takes time for all pixels, and a kilobyte of a compressed profile becomes a mebibyte."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG" if kind == "JPEG" else "PNG", progressive=True)
    plain, form = file.getvalue(), "image/jpeg" if kind == "JPEG" else "image/png"
    begin, end = (plain.rindex(b"\xff\xda"), len(plain) - 2) if kind == "JPEG" else (33, 33)
    repeated = plain[begin:end] or chunk(kind.encode(), b"a\0\0" + zlib.compress(bytes(1 << 10)))
    assert media._picture(picture_part(plain, form)["image_url"]["url"], media.Media(), param="x").size == (64, 64)
    slow = plain[:begin] + repeated * 1000 + plain[end:]
    assert "more than 32" in refused(media._picture, picture_part(slow, form)["image_url"]["url"])


class Enlarging:
    """A processor that makes a mebibyte and 10 tokens of each picture and each sound, however small."""

    image_token, audio_token, image_processor = "<image>", "<sound>", True

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, *, text: list[str], images: Any = (), audio: Any = (), **_: Any) -> dict[str, torch.Tensor]:
        self.seen += len(images) + len(audio)
        ids = torch.zeros((1, len(text[0]) + 10 * (len(images) + len(audio))), dtype=torch.long)
        values = torch.zeros((len(images) + len(audio), 1 << 20), dtype=torch.uint8)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "values": values}


@settings(max_examples=20)
@given(st.lists(st.integers(1, 3), max_size=64), st.lists(st.integers(1, 3), max_size=10), st.integers(0, 80))
def test_what_a_processor_makes_is_limited_before_it_is_made(
    sides: list[int], sounds: list[int], mebibytes: int
) -> None:
    given = media.Media([Image.new("RGB", (side, 1)) for side in sides], [np.zeros(length) for length in sounds])
    enlarging, many = Enlarging(), len(sides) + len(sounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "_BYTES", mebibytes << 20)
        if many <= mebibytes:
            _, found = media.Processor(enlarging).inputs("", given, context=10_000)
            assert len(found["values"]) == many
            return
        with pytest.raises(ConfigError, match="send less"):
            media.Processor(enlarging).inputs("", given, context=10_000)
    assert enlarging.seen == len(set(sides)) + len(set(sounds))  # one of each size


def test_pictures_that_exceed_the_context_are_not_processed() -> None:
    enlarging = Enlarging()
    given = media.Media([Image.new("RGB", (1, 1))] * 60)
    with pytest.raises(ConfigError, match="this model's context is 500"):
        media.Processor(enlarging).inputs("", given, context=500)
    assert enlarging.seen == 1


@pytest.mark.parametrize("place", ["<image>", "<sound>"])
def test_a_text_has_no_places_for_pictures_or_sounds(place: str) -> None:
    """Each place becomes thousands of tokens, and a body of 8 MiB has room for a million places."""
    enlarging = Enlarging()
    given = media.Media([Image.new("RGB", (1, 1))], [np.zeros(1)])
    with pytest.raises(ConfigError, match="leave it out of texts"):
        media.Processor(enlarging).inputs(place * 2, given, context=500)
    assert enlarging.seen == 0


class Counted(str):
    """A text that counts the characters that searches pass."""

    passed = 0

    def find(self, wanted: str, begin: int = 0) -> int:  # type: ignore[override]
        found = super().find(wanted, begin)
        self.passed += (len(self) if found < 0 else found + len(wanted)) - begin
        return found

    def __contains__(self, wanted: object) -> bool:
        self.passed += len(self)
        return super().__contains__(wanted)  # type: ignore[operator]


def test_looking_for_the_texts_of_a_chat_reads_it_once() -> None:
    texts = [f" {number % 7} " for number in range(1000)]
    said: Any = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
    rendered = Counted("[user]" + "".join(texts) + "[assistant]")
    media.check_kept(said, rendered)
    assert rendered.passed <= len(rendered)


def test_a_template_that_leaves_out_a_text_is_refused() -> None:
    said: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what is it? "}]}]
    media.check_kept(said, "[user]<image>what is it?[assistant]")
    with pytest.raises(ConfigError, match="leaves out texts"):
        media.check_kept(said, "[user]<image>[assistant]")


def test_a_model_of_texts_alone_has_no_processor(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="no processor"):
        load_processor(tiny)
    with pytest.raises(UnsupportedModelError, match="pictures or sounds"):
        load_language_model(tiny, remote=SIMULATED, media=True)


def test_a_processor_loads_no_other_model(tmp_path: Path) -> None:
    write(tmp_path, "Llava")
    settings = tmp_path / "processor_config.json"
    text = settings.read_text()
    settings.write_text(text.replace("{", '{"audio_tokenizer": {"audio_tokenizer_name_or_path": "x/y"},', 1))
    with pytest.raises(CheckpointError, match="audio_tokenizer"):
        load_processor(tmp_path)
    settings.write_text(text.replace('"height": 16', '"height": 100000'))
    with pytest.raises(CheckpointError, match="height"):
        load_processor(tmp_path)
