"""Text: token ids, their masks, and accompanying inputs."""

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form, special_ids

IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id", "image_patch_id")


def ids(form: Form) -> Tensor:
    """Token ids; behind the places of an image, where one is given."""
    text = form.ids(form.length)
    if not form.image_tokens:
        return text
    image = dict(special_ids(form.config))
    token = next(i for name, i in image.items() if name in IMAGE_TOKENS)
    return torch.cat([torch.full((form.batch, form.image_tokens), token), text], dim=1)


def mask(form: Form) -> Tensor | None:
    """The attention mask of a text; an image is never padded."""
    text = form.mask(form.length) if "input_ids" in form.parameters else None
    if text is None or not form.image_tokens:
        return text
    if form.padding == "left":  # pads come before the image
        text = text.sort(dim=1).values
    return torch.cat([form.ones(form.image_tokens), text], dim=1)


def every_mask(form: Form) -> Tensor:
    """The attention mask of a text, also where nothing is padded."""
    text = mask(form)
    return form.ones(form.image_tokens + form.length) if text is None else text


def token_kinds(form: Form) -> Tensor | None:
    """1 at an image, 0 at text."""
    if not form.image_tokens:
        return None
    return torch.cat([form.ones(form.image_tokens), 0 * form.ones(form.length)], dim=1)


def decoder_length(form: Form) -> int:
    """Another than the encoder's, so that cross-attention is told from self-attention by its shape."""
    return form.length - 2 if form.length > 4 else form.length + 2


def decoder_ids(form: Form) -> Tensor:
    """Ids for the decoder, whose vocabulary can be another than the encoder's."""
    decoder = form.config.get_text_config(decoder=True)
    return form.ids(decoder_length(form), int(getattr(decoder, "vocab_size", None) or form.vocabulary))


def decoder_mask(form: Form) -> Tensor | None:
    """The decoder's attention mask."""
    return form.mask(decoder_length(form)) if "decoder_input_ids" in form.parameters else None


def channel_ids(form: Form) -> Tensor:
    """One id for each channel of sound, at every step of the decoder."""
    return decoder_ids(form)[..., None].expand(-1, -1, form.number("num_channels"))


def boxes(form: Form) -> Tensor:
    """The box of each word on its page: (x0, y0, x1, y1)."""
    corner = form.integers(0, 20, form.batch, form.length, 2)
    return torch.cat([corner, corner + form.integers(1, 10, form.batch, form.length, 2)], dim=-1)


def embedded(form: Form) -> Tensor:
    """Tokens as the model's width of numbers."""
    return form.floats(form.batch, form.length, form.number("hidden_size", "d_model", "dim"))


def image_tokens(form: Form) -> Tensor:
    """1 where the text leaves place for the vectors of an image."""
    is_image = torch.zeros(form.batch, form.length, dtype=torch.long)
    is_image[:, 1 : 1 + form.number("latent_query_num")] = 1
    return is_image
