"""Pictures and sounds in chats: real architectures in miniature, and files that lie about their size."""

import base64
import io
import socket
import struct
import wave
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from symbiosis_priv.errors import CheckpointError, ConfigError, UnsupportedModelError
from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.endpoint import serving
from tenant.endpoint.api import media
from tenant.endpoint.api.errors import ApiError
from tenant.endpoint.engine.answer import token_logprob
from tenant.endpoint.options import Serving
from tenant.model.hf import backend_of
from tenant.model.loading import load_language_model, load_processor
from tests.compatibility.families import build

Image = pytest.importorskip("PIL.Image")
KEY, RATE = "sk-0123456789abcdef", 16_000
SIMULATED = RemoteConfig(masking="simulate")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% elif c.type == 'audio' %}<|audio_bos|><|AUDIO|>"
    "<|audio_eos|>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}[assistant]"
)


def letters(*special: str) -> Any:
    """A tokenizer of bytes, with special tokens."""
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="</s>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def llava(folder: Path) -> None:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = letters("<image>")
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    place = tokenizer.convert_tokens_to_ids("<image>")
    model = build("LlavaForConditionalGeneration", image_token_index=place, text_config=text)
    sees = model.config.vision_config
    side = {"height": sees.image_size, "width": sees.image_size}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=sees.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    model.save_pretrained(folder)


def qwen2_audio(folder: Path) -> None:
    from transformers import Qwen2AudioProcessor

    tokenizer = letters("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    place = tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    hears = {"max_source_positions": 50}
    model = build("Qwen2AudioForConditionalGeneration", audio_token_index=place, text_config=text, audio_config=hears)
    extractor = WhisperFeatureExtractor(feature_size=model.config.audio_config.num_mel_bins, chunk_length=1)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE).save_pretrained(folder)
    model.save_pretrained(folder)


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


def sound_part(file: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


CASES: dict[str, Any] = {
    "llava": (llava, picture_part(png()), {"images": [Image.open(io.BytesIO(png()))]}),
    "qwen2_audio": (
        qwen2_audio,
        sound_part(wav(NOISE)),
        {"audio": [(NOISE / 32768).astype(np.float32)], "sampling_rate": RATE},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A folder, a part of a message, what the processor takes for it, and a client of an endpoint with real
    providers."""
    write, part, given = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    write(folder)
    options = Serving(media=True)
    with ExitStack() as stack:
        place, threads = tmp_path_factory.mktemp("federation"), {"executor": {"threads": 1}}
        federation = stack.enter_context(LocalFederation(folder, place, provider_options=threads))
        remote = RemoteConfig(federation=federation.federation, masking="pad")
        service = stack.enter_context(serving.opened(folder, remote, name="tiny", adapters={}, options=options))
        listener = socket.create_server(("127.0.0.1", 0))
        server = serving.server(service, listener, keys=(KEY,), masking="pad", options=options)
        server.start()
        stack.callback(server.stop)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0))
        yield folder, part, given, client


def test_an_answer_has_the_bits_of_generate(case: Any) -> None:
    folder, part, given, client = case
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
    rows = [one.usage.model_extra["ledger"]["rows"] for one in (answer, other)]
    assert rows[0] > rows[1] > 0  # the ledger counts the rows of the picture or sound


def test_a_chat_goes_on_after_a_picture_or_sound(case: Any) -> None:
    _, part, _, client = case
    messages: Any = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [part, {"type": "text", "text": "and"}, part]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "more"},
    ]
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices[0].message


def test_what_the_model_does_not_take_is_refused(case: Any) -> None:
    _, part, _, client = case
    other = sound_part(wav(NOISE)) if part["type"] == "image_url" else picture_part(png())
    long = sound_part(wav(np.zeros(RATE + 1)))  # the extractor of this test takes a second
    wrong = [other, long, {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]
    for one in wrong:
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "?"}, one]}]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        assert (refused.value.param or "").startswith("messages.0.content.1")


def refused(decode: Any, *given: Any, **more: Any) -> str:
    with pytest.raises(ApiError) as error:
        decode(*given, media.Media(), param="x", **more)
    return str(error.value)


def bomb(width: int, height: int) -> bytes:
    """A PNG of one row whose header says more."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

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
    llava(tmp_path)
    settings = tmp_path / "processor_config.json"
    text = settings.read_text()
    for entry, said in (('"audio_tokenizer": {"audio_tokenizer_name_or_path": "x/y"}', "audio_tokenizer"),):
        settings.write_text(text.replace("{", "{" + entry + ",", 1))
        with pytest.raises(CheckpointError, match=said):
            load_processor(tmp_path)
    settings.write_text(text.replace('"height": 16', '"height": 100000'))
    with pytest.raises(CheckpointError, match="height"):
        load_processor(tmp_path)
