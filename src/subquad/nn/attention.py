"""`MultiheadAttention`: projections around any method."""

from jaxtyping import Float
from torch import Tensor, nn

from subquad.masks import Mask
from subquad.methods import Method, resolve
from subquad.methods.keep import Keep


class MultiheadAttention(nn.Module):
    """Multi-head attention by any method, batch first.

        out = concat_h(attention(x W_Q^h, y W_K^h, y W_V^h)) W_O

    Args:
        embed_dim: width of queries and outputs.
        num_heads: H; must divide `embed_dim`.
        method: a name, a name with settings, or a method object.
        kv_heads: G, for grouped-query attention; defaults to `num_heads`, which must be a multiple of it.
        kdim: width of the key inputs; defaults to `embed_dim`.
        vdim: width of the value inputs; defaults to `kdim`.
        bias: whether the projections have biases.
        dropout: in training, the rate of dropout as the method's trait `dropout` says.
        max_length: the longest input, for methods whose parameters depend on it.
        shared: the method's learned parameters of another layer, `other.attention.learned`, to be this layer's too.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(384, 12, method=sq.ImprovedClustered(clusters=25))
    >>> layer(torch.randn(2, 100, 384), mask=sq.Mask.padding([100, 70])).shape
    torch.Size([2, 100, 384])
    """

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
        kdim = embed_dim if kdim is None else kdim
        self.num_heads, self.kv_heads, self.head_dim, self.dropout = num_heads, kv_heads, head_dim, dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(kdim, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(kdim if vdim is None else vdim, kv_heads * head_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.attention = resolve(method).bind(
            heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, max_length=max_length, shared=shared
        )

    def forward(
        self,
        query: Float[Tensor, "B N _q"],
        key: Float[Tensor, "B M _k"] | None = None,
        value: Float[Tensor, "B M _v"] | None = None,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        seed: int | None = None,
        keep: Keep | None = None,
    ) -> Float[Tensor, "B N _q"]:
        """Attend from `query` to `key` and `value`; alone, self-attention; `value` defaults to `key`.

        `keep` names tokens whose attention is exact in self-attention, as in `subquad.attention`.
        A padded query's attention is 0, so that its output is the bias of the last projection.
        """
        method = self.attention.method
        step = method.traits.cached and mask is not None and mask.offset is not None
        if key is not None and key is not query and not (method.traits.cross or step):
            raise ValueError(f"{method.name!r} does not support cross-attention: its keys are those of the queries")
        key = query if key is None else key
        value = key if value is None else value
        out = self.attention(
            self._split(self.q_proj(query), self.num_heads),
            self._split(self.k_proj(key), self.kv_heads),
            self._split(self.v_proj(value), self.kv_heads),
            mask=mask,
            is_causal=is_causal,
            bias=bias,
            seed=seed,
            keep=keep,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self._join(out)

    def init_state(self, batch: int) -> dict[str, Tensor]:
        """The state before the first token, for `step`; ValueError where the method has none.

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
        heads = self._split(self.q_proj(x), self.num_heads)
        keys, values = (self._split(project(x), self.kv_heads) for project in (self.k_proj, self.v_proj))
        out, state = self.attention.step(heads, keys, values, state, mask=mask, seed=seed)
        return self._join(out), state

    def _join(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)
