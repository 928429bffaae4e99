"""One forward pass of a Hugging Face model over tokens of many sequences.

Each token is a batch row of length one: `input_ids` and `position_ids` are `[rows, 1]`. So norms, MLPs and offloaded
linears compute all tokens at once, each layer group is one request, and `Tasks.batch` gives each row the adapter of its
own request. Only attention uses other tokens. The model gets a `_Step` as its cache. A registered attention
implementation recognises the keys that this cache has returned, and computes each sequence from its own keys and
values. All other calls use the model's own implementation, so the model can be used as before.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from symbiosis_priv.errors import UnsupportedModelError
from tenant.endpoint.engine.attention import Attention
from tenant.endpoint.engine.kv import KeyValues, Shape
from tenant.model.remote_linear import RemoteLayer
from tenant.tasks import Tasks
from tenant.tasks.batch import BASE
from tenant.tasks.row_blocks import ROWS, ModuleBlocks
from tenant.training.corpus import context_of

_PREFIX = "packed_"
_STEP = "_symbiosis_priv_step"  # attribute of keys that a `_Step` has returned
LONGEST = 1 << 20  # tokens of a sequence, for a model without a limit


@dataclass(frozen=True, kw_only=True, eq=False)
class NextTokens:
    """The next tokens of one sequence. `kv`: keys and values of all earlier tokens; those of `tokens` are appended.
    `logits`: number of last tokens whose logits are returned. `pooled`: the hidden states are needed, and no logits."""

    kv: KeyValues
    tokens: Sequence[int]
    adapter: str | None = None
    logits: int = 1
    pooled: bool = False


class Output(NamedTuple):
    """Results for one `NextTokens`: logits `[rows.logits, vocabulary]`, and the last hidden states `[tokens, width]`,
    which `SingleModel` returns only if `rows.pooled`."""

    logits: Tensor
    hidden: Tensor


class PackedModel:
    """A model that computes tokens of many sequences in one pass. Raises `UnsupportedModelError`: the model's attention
    cannot be computed sequence by sequence.

    Attributes:
        context: largest number of tokens of a sequence.
        hides_answers: True if an offloaded LM head gets all rows of a pass, so that executors do not see how many
            tokens are chosen.
        together: True if a pass has tokens of many sequences.
    """

    together = True

    def __init__(self, model: PreTrainedModel, tasks: Tasks | None = None) -> None:
        self.model: Any = model
        self.tasks = tasks
        self.hides_answers = False
        self.config: Any = model.config.get_text_config(decoder=True)
        # what the configuration shows not to be supported
        kinds = set(getattr(self.config, "layer_types", None) or ())
        rope = getattr(self.config, "rope_parameters", None) or {}
        ropes = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError("it has an encoder")
        if others := sorted(kinds - {"full_attention", "sliding_attention"}):
            raise UnsupportedModelError(f"it has layers of the kind {', '.join(others)}")
        if getattr(self.config, "num_kv_shared_layers", 0):
            raise UnsupportedModelError("its layers share keys and values")
        if model.get_output_embeddings() is None or model.base_model is model:
            raise UnsupportedModelError("it has no LM head")
        self.context = context_of(self.config) or LONGEST
        for one in ropes:  # behind these positions, the longest sequence of a batch would decide about all
            if one.get("rope_type") in ("dynamic", "longrope"):
                original = one.get("original_max_position_embeddings") or self.config.max_position_embeddings
                self.context = min(self.context, original)
        self.shape = Shape.from_config(self.config, model.dtype)
        words: Any = model.get_input_embeddings()
        self.vocabulary: int = words.num_embeddings
        head = model.get_output_embeddings()
        self._head = next(name for name, module in model.named_modules() if module is head)
        self._blocks = ModuleBlocks(model)
        self._original = self.config._attn_implementation
        packed = _registered(self._original)
        model.set_attn_implementation(packed)
        if self.config._attn_implementation != packed:
            raise UnsupportedModelError("the model does not use transformers' attention interface")

        def keep_hidden(module: Any, args: Any, output: Any) -> None:
            step = getattr(output, "past_key_values", None)
            if isinstance(step, _Step) and not step.selected:
                output.last_hidden_state = step.select(output.last_hidden_state)

        inner = (module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model)
        self._hooks = [module.register_forward_hook(keep_hidden) for module in inner]

    def close(self) -> None:
        """Restore the model's own attention implementation."""
        for hook in self._hooks:
            hook.remove()
        self._blocks.close()
        self.model.set_attn_implementation(self._original)

    def new_kv(self) -> KeyValues:
        """Return an empty sequence."""
        return KeyValues(self.shape)

    @torch.no_grad()
    def __call__(self, rows: Sequence[NextTokens]) -> list[Output]:
        """Compute the next tokens of some sequences, all different. After an error, the sequences have their old
        lengths. Raises `SymbiosisError` if a product has failed, or an adapter cannot be loaded."""
        before = [part.kv.length for part in rows]
        names = [part.adapter or BASE for part in rows for _ in part.tokens]
        tokens = [token for part in rows for token in part.tokens]
        last = self.context - 1  # tokens of a guess after the last position are not used
        places = [begin + i for begin, part in zip(before, rows, strict=True) for i in range(len(part.tokens))]
        positions = [min(place, last) for place in places]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.model.device)[:, None]

        plain = self.tasks is None or set(names) == {BASE}
        try:
            # an adapter that changes the LM head needs all rows of the batch
            adapted = () if self.tasks is None else {part.adapter for part in rows}
            keep_all = any(name and self.tasks and self._head in self.tasks.layers(name) for name in adapted)
            keep_all |= self.hides_answers and isinstance(self.model.get_output_embeddings(), RemoteLayer)
            step = _Step(rows, keep_all=keep_all)
            batch = nullcontext() if plain or self.tasks is None else self.tasks.batch(names, block=ROWS)
            with batch, self._blocks.step(adapted=not plain):
                output = self.model(
                    input_ids=column(tokens), position_ids=column(positions), past_key_values=step, use_cache=True
                )
        except BaseException:
            for part, length in zip(rows, before, strict=True):
                part.kv.truncate(length)
            raise
        return step.outputs(output.logits)


class _Step(Cache):
    """The cache of one pass: appends keys and values to the sequences, and maps rows to sequences."""

    def __init__(self, rows: Sequence[NextTokens], *, keep_all: bool) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._ends = list(accumulate(len(part.tokens) for part in rows))
        for part in rows:
            part.kv.grow(len(part.tokens))
        self._attention = Attention([(part.kv, len(part.tokens)) for part in rows])
        self.windows = rows[0].kv.shape.windows
        self._keep_all = keep_all
        self._hidden: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._attention.append(layer_idx, key_states[:, :, 0], value_states[:, :, 0])
        setattr(key_states, _STEP, (self, layer_idx))
        return key_states, value_states

    def attend(self, queries: Tensor, layer: int, **options: Any) -> Tensor:
        """Compute attention of all rows: `[rows, heads, 1, width]` to `[rows, 1, heads, width]`."""
        return self._attention.attend(layer, queries[:, :, 0], **options).unsqueeze(1)

    @property
    def selected(self) -> bool:
        return self._hidden is not None

    def select(self, hidden: Tensor) -> Tensor:
        """Keep the hidden states of all rows, and return those whose logits are needed."""
        self._hidden = hidden
        return hidden if self._keep_all else hidden[self._wanted(hidden.device)]

    def outputs(self, logits: Tensor) -> list[Output]:
        if self._hidden is None:
            raise UnsupportedModelError("the model does not return its cache with its hidden states")
        if self._keep_all:
            logits = logits[self._wanted(logits.device)]
        hidden = self._hidden[:, 0].split([len(part.tokens) for part in self._rows])
        each = logits[:, 0].split([part.logits for part in self._rows])
        return [Output(*pair) for pair in zip(each, hidden, strict=True)]

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """Return no keys, so that `_registered` makes no mask."""
        return 0, 0

    def _wanted(self, device: torch.device) -> Tensor:
        wanted = [i for part, end in zip(self._rows, self._ends, strict=True) for i in range(end - part.logits, end)]
        return torch.tensor(wanted, dtype=torch.long, device=device)


def _registered(original: str) -> str:
    """Register an attention implementation that computes the rows of a `_Step`, and otherwise calls `original`."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        step, layer = getattr(key, _STEP, (None, 0))
        if step is None:
            eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            own = AttentionInterface().get_interface(original, eager)
            result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, *args, **kwargs)
            return result
        if attention_mask is not None or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
            raise UnsupportedModelError("its attention uses a mask or a bias of its own")
        window = step.windows[layer]
        everywhere = getattr(module.config, "layer_types", None) is None  # otherwise some layers ignore this argument
        if kwargs.get("sliding_window") != window and (everywhere or window is not None):
            raise UnsupportedModelError("its attention has another window than its configuration")
        scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        options = {"scaling": scaling, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
        return step.attend(query, layer, window=window, **options), None

    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if kwargs.get("kv_length") == 0 else AttentionMaskInterface()[original](*args, **kwargs)

    AttentionInterface.register(_PREFIX + original, attention)
    AttentionMaskInterface.register(_PREFIX + original, mask)
    return _PREFIX + original
