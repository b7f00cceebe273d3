import os

from tests.triton.processes import CHOSEN, KINDS

collect_ignore = [kind for kind in KINDS if kind != os.environ.get(CHOSEN)]
