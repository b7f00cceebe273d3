"""Survey every model type of transformers.

python -m tests.library.hf.survey --out results.json [--types a,b] [--table]
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.library.hf.survey.compare import survey
from tests.library.hf.survey.pool import run_all
from tests.library.hf.survey.table import write
from tests.library.hf.survey.zoo import model_types

LIMIT = 240.0  # seconds for one model type


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.library.hf.survey", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON; types that it has are not run again")
    parser.add_argument("--types", help="model types, separated by commas; all by default")
    parser.add_argument("--again", action="store_true", help="run types that --out has, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--table", action="store_true", help="write docs/assets/architectures.csv from all that --out has"
    )
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    types = options.types.split(",") if options.types else model_types()
    wanted = [t for t in types if options.again or t not in results]
    for model_type, result in run_all(survey, wanted, options.processes, LIMIT, died):
        results[model_type] = result
        print(f"{model_type}: {result['status']} {result.get('reason', '')[:150]}", flush=True)
        options.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(dict(Counter(r["status"] for r in results.values())))
    if options.table:
        write(results)


def died(reason: str) -> dict[str, Any]:
    """The result of a type that gave none: it ended its process, or it is too slow to be called small."""
    return {
        "status": "cannot be built" if reason.startswith("no result") else "crashed",
        "reason": reason,
        "checks": {},
    }


if __name__ == "__main__":
    main()
