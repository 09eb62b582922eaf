"""Write the JSON Schema of results.json: ``python -m compare_q.eval.results``."""

import json
from pathlib import Path

from . import json_schema

if __name__ == "__main__":
    target = Path(__file__).parent.parent / "spec" / "schema" / "results.schema.json"
    target.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
