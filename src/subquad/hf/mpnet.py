"""MPNet, whose attention transformers computes in the model's own code, made to go through the attention interface.

    weights_ij = softmax_j(q_i·k_j / √D + b_h(j − i) + mask_ij)          out_i = Σ_j weights_ij v_j

The bias b of a distance is one table for all layers, which the encoder hands to each of them as (B,H,N,N) numbers.

Importing this file changes `MPNetSelfAttention`, so that models that ask for subquad's attention never run another: a
layer remembers its config, and calls the function that the config names. Under "eager", which is all that transformers
offers for MPNet, a layer runs the code of transformers as before.
"""

import functools
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetPreTrainedModel, MPNetSelfAttention

from subquad.core.versions import let_attention_be_set

_original_init, _original_forward = MPNetSelfAttention.__init__, MPNetSelfAttention.forward


@functools.wraps(_original_init)
def _init(self: Any, config: Any) -> None:
    _original_init(self, config)
    self.config = config


def _forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """The layer's output (B,N,D), and its weights if they are asked for; not wrapped, because the code is looked at."""
    implementation = self.config._attn_implementation if hasattr(self, "config") else "eager"
    if implementation == "eager":
        return _original_forward(self, hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
    shape = (*hidden_states.shape[:-1], -1, self.attention_head_size)
    query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
    out, weights = attend(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.attention_head_size**-0.5,
        dropout=self.dropout.p if self.training else 0.0,
        position_bias=position_bias,
        output_attentions=output_attentions,
    )
    out = self.o(out.flatten(2))
    return (out, weights) if output_attentions else (out,)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as the model's own code computes it, (B,N,H,E) and the weights. Trials compare with it layer by layer.

    That it is the model's own they see from the outputs, which come from transformers' code.
    """
    logits = query @ key.mT * scaling
    for term in (position_bias, attention_mask):
        logits = logits if term is None else logits + term
    weights = nn.functional.dropout(logits.softmax(-1), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def _is_on_interface(module: type[nn.Module]) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in module.forward.__code__.co_names


def join_interface() -> None:
    """Have MPNet's layers call the attention function that their config names; not if a transformers does this."""
    if not _is_on_interface(MPNetSelfAttention):
        MPNetSelfAttention.__init__, MPNetSelfAttention.forward = _init, _forward
        for model in (MPNetPreTrainedModel, *MPNetPreTrainedModel.__subclasses__()):
            let_attention_be_set(model)


def give_configs(model: PreTrainedModel) -> None:
    """Give MPNet's layers their config if they were made before this file was imported."""
    for encoder in model.modules():
        if isinstance(encoder, MPNetEncoder):
            for module in encoder.modules():
                if isinstance(module, MPNetSelfAttention) and not hasattr(module, "config"):
                    module.config = encoder.config
