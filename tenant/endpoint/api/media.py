"""Pictures and sounds in the messages of a chat, and the model's processor that makes tensors of them.

They come with the request and are decoded on this machine: nothing is fetched. Sizes are read from headers and checked
before anything is decoded, because a small file can describe a huge picture. Pillow and a processor of transformers
read them; no file format is guessed, and no other decoder is tried. What a processor makes of a picture or sound
depends on its size, so a blank one of each size is processed first, and multiplied by the number of that size.
"""

import base64
import binascii
import io
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from symbiosis_priv.errors import ConfigError, one_line
from tenant.endpoint.api.bodies import AudioPart, ImagePart, TextPart
from tenant.endpoint.api.errors import ApiError

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP"}
_PIXELS = 1 << 24  # of all pictures of a request: 48 MiB as bytes, 192 MiB as float32
_RATIO = 32  # of width and height: a processor that scales the shorter side up makes a huge picture of a thin one
_SECONDS = 600.0  # of all sounds of a request
_PARTS = 64
_BYTES = 1 << 29  # of the processor's tensors; Idefics3's takes 2.4 times as much while it makes them
_REPEATED = {"JPEG": (b"\xff\xda",), "PNG": (b"iCCP", b"iTXt", b"zTXt")}  # scans; compressed profiles and texts
_REPEATS = 32  # of a picture: each scan takes time for all pixels, and each profile a mebibyte; encoders write 10 scans


@dataclass
class Media:
    """What the messages of one request have besides texts, in their order. `pixels` and `seconds`: sizes so far."""

    pictures: list[Any] = field(default_factory=list)
    sounds: list[np.ndarray[Any, Any]] = field(default_factory=list)
    pixels: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.pictures or self.sounds)


class Processor:
    """An object of transformers (from `load_processor`) that takes texts with pictures or sounds."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        extractor = getattr(processor, "feature_extractor", None)
        self._rate = getattr(extractor, "sampling_rate", None)
        self._longest = getattr(extractor, "n_samples", None)  # Whisper's cuts a longer sound off, without an error
        self._pictures = getattr(processor, "image_processor", None) is not None
        self._cost = lru_cache(1024)(self._blank_cost)

    def template_part(self, part: TextPart | ImagePart | AudioPart, media: Media, *, param: str) -> dict[str, str]:
        """Return a part of a message for chat templates, and add a picture or sound to `media`. Raises `ApiError` if
        the model does not take it, or it cannot be decoded."""
        if isinstance(part, TextPart):
            return {"type": "text", "text": part.text}
        if len(media.pictures) + len(media.sounds) >= _PARTS:
            raise ApiError(400, f"at most {_PARTS} pictures and sounds are read", param=param)
        if isinstance(part, ImagePart):
            if not self._pictures:
                raise ApiError(400, "this model takes no pictures", param=param)
            media.pictures.append(_picture(part.image_url.url, media, param=f"{param}.image_url.url"))
            return {"type": "image"}
        if self._rate is None:
            raise ApiError(400, "this model takes no sounds", param=param)
        sound = _sound(part.input_audio.data, media, rate=self._rate, param=f"{param}.input_audio.data")
        if self._longest is not None and len(sound) > self._longest:
            most = self._longest / self._rate
            raise ApiError(400, f"this model hears at most {most:g} s in one sound; divide it", param=param)
        media.sounds.append(sound)
        return {"type": "audio"}

    def inputs(self, text: str, media: Media, *, context: int) -> tuple[list[int], Mapping[str, Any]]:
        """Return the token ids of a rendered chat with places for `media`, and the other tensors of the forward pass.
        Raises `ConfigError` if text and media do not fit together, or have more than `context` tokens."""
        for kind, given in (("image", media.pictures), ("audio", media.sounds)):
            place = getattr(self._processor, f"{kind}_token", None)
            if place is not None and text.count(place) > len(given):  # each place becomes many tokens
                raise ConfigError(f"{place} stands for a picture or sound; leave it out of texts")
        sizes = Counter[Any](picture.size for picture in media.pictures) + Counter(map(len, media.sounds))
        costs = [(number, *self._cost(size)) for size, number in sizes.items()]
        tokens, size = (sum(number * cost[which] for number, *cost in costs) for which in (0, 1))
        if tokens > context:
            raise ConfigError(f"pictures and sounds take {tokens:,} tokens, and this model's context is {context:,}")
        if size > _BYTES:
            raise ConfigError(
                f"the model's processor makes {size >> 20:,} MiB of these pictures and sounds, and a request may have "
                f"{_BYTES >> 20:,}; send less"
            )
        return self._processed(text, media.pictures, media.sounds)

    def _blank_cost(self, size: tuple[int, int] | int) -> tuple[int, int]:
        """Return the number of tokens and bytes that the processor makes of a picture (width, height) or a sound
        (samples)."""
        if isinstance(size, int):
            ids, made = self._processed(self._processor.audio_token, [], [np.zeros(size, np.float32)])
        else:
            from PIL import Image

            ids, made = self._processed(self._processor.image_token, [Image.new("RGB", size)], [])
        return len(ids), sum(one.nbytes for one in made.values())

    def _processed(
        self, text: str, pictures: Sequence[Any], sounds: Sequence[Any]
    ) -> tuple[list[int], Mapping[str, Any]]:
        given: dict[str, Any] = {"text": [text], "return_tensors": "pt", "add_special_tokens": False}
        given |= {"images": pictures} if pictures else {}
        given |= {"audio": sounds, "sampling_rate": self._rate} if sounds else {}
        try:
            found = dict(self._processor(**given))
            ids, mask = found.pop("input_ids"), found.pop("attention_mask")
        except Exception as error:  # each processor of transformers raises others
            raise ConfigError(
                f"the model's processor refuses this chat ({one_line(str(error))[:200]}); send as many pictures and "
                f"sounds as its chat template has places for"
            ) from error
        if len(ids) != 1 or not bool(mask.all()):
            raise ConfigError("the model's processor makes several sequences of this chat, or pads it")
        return ids[0].tolist(), found


def _decoded(data: str, *, param: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(400, "this is not base64", param=param) from error


def _picture(url: str, media: Media, *, param: str) -> Any:
    """Return the picture of a `data:` address, RGB."""
    head, comma, data = url.partition(",")
    kind, _, encoding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:"):
        raise ApiError(
            400, "nothing is fetched from the network; send the picture: data:image/png;base64,...", param=param
        )
    if not comma or encoding != "base64" or kind not in _FORMATS:
        raise ApiError(400, f"send data:TYPE;base64,... with a TYPE of {', '.join(_FORMATS)}", param=param)
    from PIL import Image, UnidentifiedImageError

    file, form = _decoded(data, param=param), _FORMATS[kind]
    if sum(map(file.count, _REPEATED.get(form, ()))) > _REPEATS:
        what = "scans" if form == "JPEG" else "colour profiles and texts"
        raise ApiError(400, f"this picture has more than {_REPEATS} {what}; save it again without them", param=param)
    try:
        with Image.open(io.BytesIO(file), formats=[form]) as picture:
            width, height = picture.size  # of the header
            media.pixels += width * height
            if media.pixels > _PIXELS:
                raise ApiError(
                    400, f"{width:,} x {height:,}: at most {_PIXELS:,} pixels are read; scale it down", param=param
                )
            if max(width, height) > _RATIO * min(width, height):
                raise ApiError(400, f"{width:,} x {height:,}: one side is over {_RATIO} times the other", param=param)
            return picture.convert("RGB")
    except ApiError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit comes first
        raise ApiError(400, f"at most {_PIXELS:,} pixels are read; scale it down", param=param) from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise ApiError(400, f"this is no complete picture of the type {kind}", param=param) from error


def _sound(data: str, media: Media, *, rate: int, param: str) -> np.ndarray[Any, Any]:
    """Return the samples of a WAV file, float32 in [-1, 1), the mean of its channels."""
    try:
        with wave.open(io.BytesIO(_decoded(data, param=param))) as file:
            frames, width, channels = file.getnframes(), file.getsampwidth(), file.getnchannels()
            if file.getframerate() != rate or width != 2:
                raise ApiError(
                    400,
                    f"this sound has {file.getframerate():,} samples per second of {8 * width} bits, and this model "
                    f"takes {rate:,} of 16 bits; convert it: ffmpeg -i IN -ar {rate} -c:a pcm_s16le OUT.wav",
                    param=param,
                )
            media.seconds += frames / rate
            if media.seconds > _SECONDS:
                raise ApiError(400, f"at most {_SECONDS:g} s of sound are read; send less", param=param)
            read = np.frombuffer(file.readframes(frames), dtype="<i2")
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:  # RuntimeError: a chunk ends after the file
        raise ApiError(400, "this is no WAV file (RIFF, PCM)", param=param) from error
    if not read.size or read.size % channels:
        raise ApiError(400, "this sound is empty or cut off", param=param)
    samples: np.ndarray[Any, Any] = (read.reshape(-1, channels).mean(axis=1) / 32768).astype(np.float32)
    return samples


def check_kept(messages: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise `ConfigError` if a chat template has left out a text of a user. Templates of models of pictures differ in
    whether they take a message as a text or as a list of parts, and leave out the other one without an error."""
    end = 0
    for text in (part.get("text", "") for one in messages if one["role"] == "user" for part in one["content"]):
        wanted = text.strip()
        # each text is looked for from the end of the one before: searches from the beginning take quadratic time
        if (begin := rendered.find(wanted, end)) >= 0:
            end = begin + len(wanted)
        elif wanted not in rendered:
            raise ConfigError("this model's chat template leaves out texts of parts, so it cannot be used with --media")


def texts_of(parts: Sequence[TextPart | ImagePart | AudioPart], *, param: str) -> str:
    """Return the joined texts of a message, for a model without a processor. Raises `ApiError` for other parts."""
    for place, part in enumerate(parts):
        if not isinstance(part, TextPart):
            raise ApiError(
                400,
                "this endpoint takes texts only; start `tenant serve --media` with a model of pictures or sounds",
                param=f"{param}.{place}",
            )
    return "".join(part.text for part in parts if isinstance(part, TextPart))
