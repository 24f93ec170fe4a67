"""Does it measure anything: the demo's model on questions that only the right passage answers, under six policies.

    python benchmarks/retrieval_pays.py [--model FOLDER] [--folder FOLDER] [--json]

Without `--model` the demo trains it first. p_s and the gains of the decision process are estimated from questions that
are set aside; the others are asked under every policy. The chance level is that of answering with some fact of the
person's: 1 in 48, the held-out facts of a name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from chronicles import write_chronicles

SET_ASIDE, RETRIEVALS = 40, 6
POLICIES = ["mdp", "fixed:3", "fixed:1", "fixed:2", "fixed:4", "fixed:5", "no-retrieval"]
LOCAL = ("results_file", "model", "retrieval", "engine", "timestamp")
EVALUATION = """\
model: {model}
data: {folder}/questions.jsonl
n_questions: all
policies: [{policies}]
process: estimated
calibration: {{questions: {set_aside}, retrievals: {retrievals}}}
retrieval: {{corpus: {folder}/corpus.jsonl, k: 1, success: covered, cache_dir: {folder}/cache}}
prompt_template: "Story: {{facts}}\\n{{question}}"
max_new_tokens: 12
output_dir: {folder}
"""


def main() -> int:
    """Make the data, train the model if there is none, and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="what `trainwright demo` left in demo/final_model")
    parser.add_argument("--folder", type=Path, help="where all of it goes; a temporary folder when left out")
    parser.add_argument("--villages", type=int, default=150, help="two questions each")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = arguments.model.resolve() if arguments.model else _trained(folder)
        write_chronicles(folder, villages=arguments.villages, seed=arguments.seed)
        asked = folder / "eval.yaml"
        asked.write_text(
            EVALUATION.format(
                model=model,
                folder=folder,
                policies=", ".join(POLICIES),
                set_aside=SET_ASIDE,
                retrievals=RETRIEVALS,
            )
        )
        if not arguments.json:
            return _trainwright("eval", str(asked)).returncode
        evaluated = _trainwright("eval", str(asked), "--json", stdout=subprocess.PIPE)
        if not evaluated.returncode:
            # Where it ran says nothing about what was found.
            found = {key: value for key, value in json.loads(evaluated.stdout).items() if key not in LOCAL}
            print(json.dumps(found, indent=1))
        return evaluated.returncode


def _trained(folder: Path) -> Path:
    if code := _trainwright("demo", "--output-dir", str(folder / "demo")).returncode:
        raise SystemExit(code)
    return folder / "demo" / "demo" / "final_model"


def _trainwright(*arguments: str, stdout: int | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "trainwright", *arguments], stdout=stdout)


if __name__ == "__main__":
    sys.exit(main())
