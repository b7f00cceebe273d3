"""`MultiheadAttention`: projections around any method."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.masks import Mask
from subquad.methods import BoundMethod, Method, resolve
from subquad.methods.core.current_shard import in_use
from subquad.methods.core.global_tokens import Keep
from subquad.nn.global_tokens import GlobalTokens, WithRows
from subquad.nn.memory import mask_behind, preceded, refuse_without_memory
from subquad.nn.torch_calls import (
    as_batches,
    attend_as_torch,
    check_widths,
    empty_outputs,
    refuse_nested,
    refuse_weights,
)
from subquad.nn.torch_weights import rename_torch_weights


class MultiheadAttention(nn.Module):
    """Multi-head attention with any method; a replacement for `torch.nn.MultiheadAttention`.

        out = concat_h(attention(x W_Q^h, y W_K^h, y W_V^h)) W_O

    Args:
        embed_dim: width of queries and outputs.
        num_heads: H; must divide `embed_dim`.
        method: a name, a name with settings, or a method object.
        kv_heads: G, for grouped-query attention; defaults to `num_heads`, which must be a multiple of it.
        kdim: width of the key inputs; defaults to `embed_dim`.
        vdim: width of the value inputs; defaults to `kdim`.
        bias: whether the projections have biases.
        dropout: in training, the rate of dropout, of the kind in the method's trait `dropout`.
        max_length: the longest input, for methods whose parameters depend on it.
        shared: the method's learned parameters of another layer, `other.attention.learned`, to be this layer's too.
        batch_first: whether inputs and outputs are (B, tokens, width), or (tokens, B, width).
        device: where the parameters are.
        dtype: dtype of the parameters.
        global_projections: whether the global tokens of `longformer`, and kept tokens, have projections of their own,
            `global_tokens`, as in published models. They start as copies of the others.

    Unlike torch's layer it is batch first by default, and returns the output alone unless `need_weights=False` is
    given. `load_state_dict` takes torch's weights too. It can be the self_attn and multihead_attn of
    `torch.nn.TransformerEncoderLayer` and `torch.nn.TransformerDecoderLayer`, in eval mode too. `sq.nn.swap` puts
    methods into torch's own layers.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(384, 12, method=sq.ImprovedClustered(clusters=25))
    >>> layer(torch.randn(2, 100, 384), mask=sq.Mask.padding([100, 70])).shape
    torch.Size([2, 100, 384])
    """

    # Else torch's encoder layers, in eval mode, would compute exact attention around `forward`.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        method: str | Method = "full",
        kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        max_length: int | None = None,
        shared: nn.Module | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        global_projections: bool = False,
    ):
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kv_heads", kv_heads)):
            if size < 1:
                raise ValueError(f"{name}={size}, but it must be at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}, but it must be in [0, 1)")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} does not divide into num_heads={num_heads}")
        if num_heads % kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of kv_heads={kv_heads}")
        head_dim = embed_dim // num_heads
        self.embed_dim, self.kdim = embed_dim, embed_dim if kdim is None else kdim
        self.vdim, self.batch_first = self.kdim if vdim is None else vdim, batch_first
        self.num_heads, self.kv_heads, self.head_dim, self.dropout = num_heads, kv_heads, head_dim, dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device)
        self.k_proj = nn.Linear(self.kdim, kv_heads * head_dim, bias=bias, device=device)
        self.v_proj = nn.Linear(self.vdim, kv_heads * head_dim, bias=bias, device=device)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device)
        method = resolve(method)
        ordinary = self.q_proj, self.k_proj, self.v_proj
        self.global_tokens = GlobalTokens(method, *ordinary) if global_projections else None
        self.attention = method.bind(
            heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_length=max_length,
            shared=shared,
            device=device,
        )
        self.register_load_state_dict_pre_hook(rename_torch_weights)
        self.to(device=device, dtype=dtype)

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The weights of the three projections in one tensor, as in torch's layer; None if their widths differ."""
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            return None
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The biases of the three projections in one tensor; None if there are none."""
        biases: list[Any] = [project.bias for project in (self.q_proj, self.k_proj, self.v_proj)]
        return None if biases[0] is None else torch.cat(biases)

    def forward(
        self,
        query: Float[Tensor, "... _q"],
        key: Float[Tensor, "... _k"] | None = None,
        value: Float[Tensor, "... _v"] | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        seed: int | None = None,
        keep: Keep | None = None,
        memory: Float[Tensor, "... _q"] | None = None,
        parallel: Any = None,
    ) -> Any:
        """Attend from `query` to `key` and `value`; by default to itself, and `value` defaults to `key`.

        An empty batch, or one without queries, has empty outputs, as in torch's layer.

        Args:
            query: (B,N,embed_dim), or (N,B,embed_dim) without `batch_first`, or (N,embed_dim); or nested.
            key: (B,M,kdim) in the same order of axes.
            value: (B,M,vdim).
            key_padding_mask: (B,M) as in torch: True, or −inf, hides a key. Padded queries are computed.
            need_weights: True is refused; False returns (out, None) as torch does; None returns the output alone.
            attn_mask: (N,M) or (B·H,N,M) as in torch: True hides, floats are added; padding, causal or a window,
                or anything else that the method supports (see `Mask.from_sdpa`).
            average_attn_weights: accepted for compatibility, ignored.
            is_causal: no key of the future. With `attn_mask`, the hint that it is causal.
            mask: a `Mask`, in place of torch's two. A padded query's attention is 0, so that its output is the bias of
                the last projection.
            bias: (B|1,H|1,N,M), added to the logits.
            seed: as in `subquad.attention`.
            keep: tokens whose attention is exact in self-attention, as in `subquad.attention`.
            memory: (B,R,embed_dim), hidden states that come before those of `query` in self-attention, as `remember`
                keeps them. They are keys and values, without a gradient to them. `mask` is then that of N queries and
                R + N keys, or padding of the new tokens.
            parallel: as in `subquad.attention`: the inputs are this rank's tokens. `sq.distributed.use` sets it for all
                layers of a model. `attn_mask`, a memory and nested tensors are not supported with it.

        Raises:
            ValueError: need_weights=True; inputs of another width; both kinds of masks; what the method cannot take; a
                memory of another batch, width or device, or with `key` or torch's masks.
            TypeError: a memory of another dtype.
        """
        refuse_weights(need_weights)
        method = self.attention.method
        if memory is not None:
            if in_use(parallel) is not None:
                raise ValueError("`memory` is not supported with `parallel`; omit it, or run the layer on one rank")
            self._check_memory(query, key, value, key_padding_mask, attn_mask)
            axis = 1 if self.batch_first and query.ndim == 3 else 0
            key = preceded(query, memory, axis, "query")
            mask = mask_behind(memory.shape[axis], mask, query.shape[axis], is_causal=is_causal)
            is_causal = False
        key = query if key is None else key
        value = key if value is None else value
        same = key is query
        parallel = in_use(parallel, self_attention=same)
        step = method.traits.cached and mask is not None and mask.offset is not None
        (query, key, value), lengths, back = as_batches(query, key, value, batch_first=self.batch_first)
        hidden, attention = query, self._attention(query, key, value)
        query, key, value = self._projected(self, query, key, value)
        options: dict[str, Any] = {"seed": seed, "keep": keep, "dropout_p": self.dropout if self.training else 0.0}
        options |= {"hidden": hidden, "parallel": parallel}
        if key_padding_mask is not None or attn_mask is not None:
            if mask is not None or bias is not None or lengths is not None:
                other = "nested inputs" if lengths is not None else "`mask` or `bias`"
                raise ValueError(f"torch's masks are given together with {other}; express all of it in `mask`")
            options |= {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "self_attention": same}
            out = attend_as_torch(attention, query, key, value, is_causal=is_causal, **options)
        else:
            if not (same or method.traits.cross or step):
                raise ValueError(
                    f"{method.label!r} does not support cross-attention: its keys are those of the queries"
                )
            refuse_nested(lengths, parallel)
            if lengths is not None:
                mask = (mask or Mask()) & Mask.padding(lengths)
            empty = empty_outputs(query, key, value)
            if empty is None:
                out = attention(query, key, value, mask=mask, is_causal=is_causal, bias=bias, **options)
            else:
                out = empty
        out = back(self._join(out))
        return out if need_weights is None else (out, None)

    def _check_memory(self, query: Tensor, key: Tensor | None, value: Tensor | None, *torchs: Tensor | None) -> None:
        """ValueError if a memory is not possible: in cross-attention, with torch's masks, and with nested tensors."""
        refuse_without_memory(self.attention.method)
        if query.is_nested or any(x is not None and x is not query for x in (key, value)):
            raise ValueError("`memory` is for self-attention to padded tokens: give `query` alone")
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            raise ValueError(
                f"`memory` is for self-attention, but this layer has queries of width {self.embed_dim}, keys of "
                f"{self.kdim} and values of {self.vdim}"
            )
        if any(mask is not None for mask in torchs):
            raise ValueError(
                "`memory` goes with `mask` and `is_causal`, not with torch's key_padding_mask and attn_mask"
            )

    def init_state(self, batch: int) -> dict[str, Tensor]:
        """The state before the first token, for `step`; ValueError if the method has none.

        Tensors with the batch as their first axis, on the layer's device, in fp32 or better.
        """
        return self.attention.init_state(batch, like=self.v_proj.weight)

    def step(
        self, x: Float[Tensor, "B N _q"], state: dict[str, Tensor], *, mask: Mask | None = None, seed: int | None = None
    ) -> tuple[Float[Tensor, "B N _q"], dict[str, Tensor]]:
        """Causal self-attention of N ≥ 1 new tokens to all before them: (out, the state with them).

        The outputs are those of `forward(…, is_causal=True)` over all tokens, at a cost that does not depend on how
        many there were. The state given is left as it is. `mask` is padding of the new tokens alone, such as
        Mask.padding(real) of prompts that are padded on the left.

        Raises:
            ValueError: the method is not recurrent, the state is not this layer's or batch's, or the layer would drop.

        >>> import torch, subquad as sq
        >>> layer = sq.nn.MultiheadAttention(32, 4, method="linear").eval()
        >>> x = torch.randn(2, 50, 32)
        >>> out, state = layer.step(x[:, :49], layer.init_state(2))  # a prompt
        >>> last, state = layer.step(x[:, 49:], state)  # one more token
        >>> torch.allclose(last, layer(x, is_causal=True)[:, 49:], atol=1e-5)
        True
        """
        if self.training and self.dropout:
            raise ValueError(f"a step drops nothing, but this layer trains with dropout={self.dropout}; call eval()")
        heads, keys, values = self._projected(self, x, x, x)
        out, state = self.attention.step(heads, keys, values, state, mask=mask, seed=seed)
        return self._join(out), state

    def _attention(self, query: Tensor, key: Tensor, value: Tensor) -> WithRows | BoundMethod:
        """The bound method, with the rows of global tokens by their own projections where there are such."""
        projections = self.global_tokens
        return (
            self.attention
            if projections is None
            else projections.around(self.attention, *self._projected(projections, query, key, value))
        )

    def _projected(self, by: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of queries, keys and values by the projections of this layer or of its global tokens.

        Raises:
            ValueError: the width of one is not that of this layer.
        """
        projects = by.q_proj, by.k_proj, by.v_proj
        if all(type(project) is nn.Linear and not project._forward_pre_hooks for project in projects):
            check_widths((query, key, value), [project.in_features for project in projects])
        key, value = self._split(by.k_proj(key), self.kv_heads), self._split(by.v_proj(value), self.kv_heads)
        return self._split(by.q_proj(query), self.num_heads), key, value

    def _join(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
