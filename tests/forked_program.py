"""A program for the tests of `forks`: print what it was given, or fail in the way that its argument names."""

import os
import sys
import threading
import time

if __name__ == "__main__":
    match sys.argv[1]:
        case "raise":
            raise ValueError("no more")
        case "exit":
            print("so long", file=sys.stderr)
            sys.exit(3)
        case "abort":
            os.abort()
        case "hang":
            time.sleep(600)
    print("|".join(sys.argv[1:]))
    print(sys.stdin.read().strip())
    print(os.environ.get("SUBQUAD_TESTED"))
    print(threading.active_count(), "thread")
    print(f"has {'' if 'tests.test_forks' in sys.modules else 'not '}imported tests.test_forks")
