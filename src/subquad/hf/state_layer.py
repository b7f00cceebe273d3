"""One layer of a cache that holds a method's state in place of keys and values.

transformers gives a layer's new keys and values to the cache, takes back all of them, and attends. A state layer gives
back the new ones alone, marked with itself: the attention that they reach (`boundary.attend`) reads the mark and
advances the state. Nothing is kept on the model, so caches do not mix, whatever the order of their calls.
"""

from typing import Any, NoReturn

from torch import Tensor
from torch.compiler import is_compiling
from transformers.cache_utils import CacheLayerMixin

from subquad.masks import Mask
from subquad.methods import Bound

_MARK = "_subquad_state_layer"


class StateLayer(CacheLayerMixin):
    """The state of one layer's method, and how many tokens it has seen."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Tensor] | None = None
        self.seen = 0
        self._on_its_way = False  # keys were handed out that no attention has taken yet

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new keys, marked, and the new values."""
        if is_compiling():
            refuse(
                "used inside torch.compile", "it is made and replaced in Python; compile nothing, or use another cache"
            )
        if self._on_its_way:
            raise ValueError(
                "the last keys that went through this StateCache reached no subquad attention: the layer changed them "
                "on the way, it was restored, or its attention raised an error; start with a new cache"
            )
        self.is_initialized = self._on_its_way = True
        self.seen += key_states.shape[-2]
        setattr(key_states, _MARK, self)
        return key_states, value_states

    def attend(
        self, bound: Bound, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, scale: float | None
    ) -> Tensor:
        """The outputs of the tokens that `update` was given, which are in the state from now on."""
        before = self.state
        if before is None:
            before = bound.init_state(len(query), like=query, value_dim=value.shape[3])
        out, self.state = bound.step(query, key, value, before, mask=mask, scale=scale)
        self._on_its_way = False
        return out

    # ------------------------------------------------------------------ what transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make: the state is made by the method, at the first tokens."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if all keys were there: other layers of the cache, which keep theirs, are given the same mask."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens the state has seen, padding among them."""
        return self.seen

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1

    def reset(self) -> None:
        """No token yet."""
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Item i becomes what item beam_idx[i] was."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each item so many times."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These items only."""
        self._each(lambda x: x[indices])

    def crop(self, tokens_to_remove: int) -> None:
        """ValueError: what has gone into a sum cannot be taken out of it."""
        if tokens_to_remove:
            refuse("cropped", "tokens that are in a state cannot be taken out of it; use an ordinary cache")

    def offload(self) -> None:
        """ValueError: there is nothing worth moving."""
        refuse("offloaded", "it is small; move the model")

    def prefetch(self) -> None:
        """ValueError, as `offload`."""
        self.offload()

    def _each(self, change: Any) -> None:
        if self.state is not None:
            self.state = {name: change(tensor) for name, tensor in self.state.items()}


def state_layer_of(key: Tensor) -> StateLayer | None:
    """The state layer that handed these keys out; None for keys that are all there."""
    return getattr(key, _MARK, None)


def refuse(what: str, why: str) -> NoReturn:
    """Raise for what a state cannot do."""
    raise ValueError(f"a StateCache cannot be {what}: {why}")
