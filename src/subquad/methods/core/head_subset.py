"""Some of the heads of a layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Some of the heads of a layer.

    Attributes:
        queries: the query heads.
        keys: the number of each key head; a number may be there several times.
        total: the number of query heads of the layer.
        key_total: the number of its key heads.
    """

    queries: slice
    keys: tuple[int, ...]
    total: int
    key_total: int

    @property
    def count(self) -> int:
        """The number of query heads."""
        return self.queries.stop - self.queries.start

    def within(self, queries: slice, keys: slice) -> tuple["Heads", slice, slice]:
        """The intersection with some of the layer's heads: those heads, counted from 0, and their indices here.

        The borders of `queries` do not divide the query heads of a key head.
        """
        start, stop = max(self.queries.start, queries.start), min(self.queries.stop, queries.stop)
        stop = max(start, stop)
        each = self.count // max(len(self.keys), 1)  # query heads of a key head
        local = slice(start - self.queries.start, stop - self.queries.start)
        of_keys = slice(local.start // max(each, 1), local.stop // max(each, 1))
        numbers = tuple(number - keys.start for number in self.keys[of_keys])
        within = slice(start - queries.start, stop - queries.start)
        return Heads(within, numbers, queries.stop - queries.start, keys.stop - keys.start), local, of_keys
