"""Lets TRL's trainers work with a model whose LM head is offloaded."""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tenant.model.remote_linear import RemoteLayer

_IGNORED = -100


def compute_all_logits(trainer: Any) -> None:
    """Let a trainer of TRL compute all logits with the model itself. TRL multiplies hidden states by the weight of the
    LM head, which is at the providers unless it is tied to the embeddings. Call this after the trainer was made; it
    changes nothing if the weight is here."""
    from trl.trainer.utils import FusedCausalLMOutput

    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    if not isinstance(model.get_output_embeddings(), RemoteLayer):
        return
    forward, temperature = model.forward, getattr(trainer, "temperature", 1.0)

    def scoring(*inputs: Any, fused_lm_head: bool = False, labels: Any = None, **options: Any) -> Any:
        if not fused_lm_head:
            return forward(*inputs, labels=labels, **options)
        logits, labels = forward(*inputs, **options).logits[:, :-1].float() / temperature, labels[:, 1:]
        mask = labels != _IGNORED
        with torch.no_grad():  # figures for logs; zero where nothing is learned, as TRL's are
            shares = logits.log_softmax(-1)
            entropy = -(shares.exp() * shares).sum(-1) * mask
            mean, first = logits.mean(-1) * mask, logits.argmax(-1) == labels
        return FusedCausalLMOutput(
            log_probs=-cross_entropy(logits.mT, labels, ignore_index=_IGNORED, reduction="none"),
            entropy=entropy,
            mean_logits=mean,
            is_top1=first,
            label_mask=mask,
        )

    model.forward = scoring
