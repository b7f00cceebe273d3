"""A run in which one process dies or hangs: `torchrun … -m tests.research.training.ending die|hang NUMBER WORDS…`."""

import os
import signal
import sys
import time
from typing import Any

from subquad.research.training.trainer import MethodTrainer
from subquad.tools.cli.main import app
from subquad.tools.runs import processes

AT = 13  # steps that are done


def main(how: str, number: str, *words: str) -> None:
    step = MethodTrainer.training_step

    def training_step(self: MethodTrainer, *args: Any, **options: Any) -> Any:
        if processes.number() == int(number) and self.state.global_step == AT:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return step(self, *args, **options)

    MethodTrainer.training_step = training_step
    app(list(words))


if __name__ == "__main__":
    main(*sys.argv[1:])
