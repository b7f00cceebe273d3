"""Models of sets: a Set Transformer that predicts which mixture of Gaussians a set of points comes from."""

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from subquad.kernels.attention.projections import Projections
from subquad.masks import Mask
from subquad.nn.sets import SetTransformer
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.splitting import refuse_when_split

NARROWEST = 1e-3  # of the Gaussians: a point that is one of its own would have no bound


@strict
class SetConfig(AttentionConfig):
    """A Set Transformer.

    Attributes:
        dimensions: width of the elements.
        components: Gaussians of the mixture.
        points: learned points of each block on the elements (ISAB); 0 means attention among all elements (SAB).
        decoder_layers: blocks on what is pooled.
    """

    model_type = "subquad-set"

    dimensions: int = 2
    components: int = 4
    points: int = 32
    decoder_layers: int = 1
    positions: str = "none"

    def validate_architecture(self) -> None:
        """Refuse sizes and words that no model can be made of."""
        super().validate_architecture()
        if self.positions != "none":
            raise ValueError(f"positions={self.positions!r}, but a set has no order: it must be 'none'")
        if not isinstance(self.method, str):
            raise ValueError(f"{len(self.method)} methods are given, but a model of sets has one for all its blocks")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                "kv_heads is given, but a model of sets has as many heads of keys and values as of queries"
            )
        if self.attention_dropout not in (0.0, self.hidden_dropout):
            raise ValueError(f"attention_dropout={self.attention_dropout}, but in a model of sets it is `dropout`")


@dataclass
class MixtureOutput(ModelOutput):
    """The mixture of each set, and its log-likelihood: the mean over the set's points."""

    loss: Tensor | None = None
    log_likelihood: Tensor | None = None  # (B,)
    logits: Tensor | None = None  # (B, components), of the shares
    means: Tensor | None = None  # (B, components, dimensions)
    deviations: Tensor | None = None  # (B, components, dimensions)


class MixtureModel(PreTrainedModel):
    """The mixture of Gaussians that a set of points comes from: amortised clustering (Lee et al. 2019, section 5.3).

    >>> import torch
    >>> from subquad.research.training.models import MixtureModel, SetConfig
    >>> model = MixtureModel(SetConfig(hidden_size=32, components=3)).eval()
    >>> model(torch.randn(2, 50, 2), sizes=torch.tensor([50, 20])).means.shape
    torch.Size([2, 3, 2])
    """

    config_class = SetConfig
    base_model_prefix = ""
    accepts_loss_kwargs = False  # losses are means over items

    def __init__(self, config: SetConfig):
        super().__init__(config)
        self.transformer = SetTransformer(
            config.dimensions,
            1 + 2 * config.dimensions,
            width=config.hidden_size,
            heads=config.num_attention_heads,
            layers=config.num_hidden_layers,
            points=config.points,
            seeds=config.components,
            decoder_layers=config.decoder_layers,
            method=config.method if isinstance(config.method, str) else config.method[0],
            feed_forward=config.intermediate_size,
            dropout=config.hidden_dropout,
            max_length=config.max_position_embeddings,
        )
        self.post_init()

    def forward(
        self, values: Float[Tensor, "B N I"], sizes: Int[Tensor, " B"] | None = None, **_: Any
    ) -> MixtureOutput:
        """The mixture of each set of `sizes` points, and as a loss the mean over sets of −log-likelihood per point."""
        refuse_when_split("a model of sets")
        B, N, dimensions = values.shape
        sizes = torch.full((B,), N, device=values.device) if sizes is None else sizes
        output = self.transformer(values, mask=Mask.padding(sizes)).float()
        logits, means, raw = output.split([1, dimensions, dimensions], dim=-1)
        deviations = nn.functional.softplus(raw) + NARROWEST
        likelihood = set_log_likelihood(values.float(), sizes, logits[..., 0], means, deviations)
        return MixtureOutput(-likelihood.mean(), likelihood, logits[..., 0], means, deviations)

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the initial weights of the layers; buffers that are in no file are computed again."""
        if isinstance(module, Projections):
            module.derive(module.key.device)


def set_log_likelihood(
    values: Float[Tensor, "B N I"],
    sizes: Int[Tensor, " B"],
    logits: Float[Tensor, "B C"],
    means: Float[Tensor, "B C I"],
    deviations: Float[Tensor, "B C I"],
) -> Float[Tensor, " B"]:
    """The mean over each set's points of log Σ_c π_c N(x; μ_c, diag σ_c²); 0 for an empty set."""
    gaussians = Independent(Normal(means[:, None], deviations[:, None]), 1)
    mixture = MixtureSameFamily(Categorical(logits=logits[:, None]), gaussians)
    valid = torch.arange(values.shape[1], device=values.device) < sizes[:, None]
    each = mixture.log_prob(values.masked_fill(~valid[..., None], 0.0)).masked_fill(~valid, 0.0)
    return each.sum(1) / sizes.clamp(min=1)
