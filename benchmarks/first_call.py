"""The time of a process until its first result: imports, the first call of attention, and the second."""

import json
import statistics
import subprocess
import sys

CHILD = """
import json, time
start = time.perf_counter(); import torch; torch_import = time.perf_counter() - start
start = time.perf_counter(); import subquad as sq; own_import = time.perf_counter() - start
x, seconds = torch.randn(1, 4, 256, 64), []
for _ in range(2):
    start = time.perf_counter()
    sq.attention(x, x, x, method="i-clustered")
    seconds.append(time.perf_counter() - start)
found = {"import torch": torch_import, "import subquad": own_import, "first": seconds[0], "second": seconds[1]}
print(json.dumps(found))
"""


def main() -> None:
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", CHILD])) for _ in range(5)]
    for what in runs[0]:
        print(f"{what:<16} {1e3 * statistics.median(run[what] for run in runs):8.1f} ms")


if __name__ == "__main__":
    main()
