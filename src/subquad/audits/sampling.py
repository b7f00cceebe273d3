"""The choice of the calls that are audited."""

import random


class OneOfEvery:
    """Picks one call in every `every`, at a random place in each such block."""

    def __init__(self, every: int, seed: int):
        # Not torch's: a draw would be an operation, in calls that are not audited and in transforms of torch.func.
        self._every, self._chance, self._offset = every, random.Random(seed), 0

    def __call__(self, calls: int) -> bool:
        """True if the next call is audited, after this number of calls."""
        offset = calls % self._every
        if offset == 0:
            self._offset = self._chance.randrange(self._every)
        return offset == self._offset
