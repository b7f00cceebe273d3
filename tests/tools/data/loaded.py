"""A data set whose items are computed with a method, in workers of a DataLoader.

Run `python -m tests.tools.data.loaded fork` or `spawn`.
"""

import json
import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import subquad as sq

METHODS = ("i-clustered:clusters=3,topk=4", "clustered-tail", "local:window=3", "performer:features=8", "full")


class Attended(Dataset):
    """One attention call for each item, which depends on the item's number alone."""

    def __len__(self) -> int:
        return 2 * len(METHODS)

    def __getitem__(self, number: int) -> Tensor:
        x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(number))
        return sq.attention(x, x, x, method=METHODS[number // 2])[0]


def main(start: str) -> None:
    """Print which items of two workers, started in this way, differ from those of this process."""
    torch.set_num_threads(2)  # workers have one thread each, whatever the main process has
    data = Attended()
    wanted = [data[number] for number in range(len(data))]
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=start, timeout=240)
    print(json.dumps([METHODS[n // 2] for n, item in enumerate(loader) if not torch.equal(item, wanted[n])]))


if __name__ == "__main__":
    main(sys.argv[1])
