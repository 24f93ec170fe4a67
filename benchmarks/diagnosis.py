"""How often `trainwright doctor` names the right cause of a labelled failure, with a confusion table.

    python benchmarks/diagnosis.py [FOLDER...] [--json FILE]

A case is a folder with a `case.yaml` (`cause`: the labels that are right, `fix`: regular expressions that the fixes
must hold, `rank`: the rank to name) and the logs beside it. A label may be a family: `device-oom` accepts
`device-oom/later`. Without a folder the cases of `tests/data/failures` are taken.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from trainwright.doctor.after import diagnose
from trainwright.doctor.finding import UNDETERMINED

OWN = Path(__file__).resolve().parents[1] / "tests" / "data" / "failures"


@dataclass(frozen=True)
class Verdict:
    """One case: what is right, what was said, and whether cause and fix are."""

    name: str
    wanted: tuple[str, ...]
    said: str
    confidence: str
    right: bool
    fix: bool
    seconds: float

    @property
    def wrong_but_confident(self) -> bool:
        """Another cause than the right one, said without `undetermined`."""
        return not self.right and self.said != UNDETERMINED


def cases_in(folders: Sequence[Path]) -> list[Path]:
    """Return every folder with a case.yaml below the given ones."""
    return sorted({path.parent for folder in folders for path in folder.rglob("case.yaml")})


def judge(case: Path) -> Verdict:
    """Diagnose one case and compare."""
    about: dict[str, Any] = yaml.safe_load((case / "case.yaml").read_text(encoding="utf-8"))
    given = about["cause"]
    wanted = tuple([given] if isinstance(given, str) else given)
    began_s = time.perf_counter()
    diagnosis = diagnose([folder for folder in case.iterdir() if (folder / "run.json").is_file()] or [case])
    seconds = time.perf_counter() - began_s
    finding = diagnosis.finding
    right = any(finding.cause == label or finding.cause.startswith(f"{label}/") for label in wanted)
    if about.get("rank") is not None and finding.cause != UNDETERMINED:
        right = right and finding.rank == about["rank"]
    fixes = "\n".join(finding.fixes)
    fix = right and all(re.search(pattern, fixes, re.IGNORECASE) for pattern in about.get("fix", ()))
    return Verdict(case.name, wanted, finding.cause, finding.confidence, right, fix, seconds)


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the confusion table: one line a right cause, with what was said instead where it was not."""
    rows: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        label = verdict.said if verdict.right else verdict.wanted[0]
        rows.setdefault(label, Counter())[verdict.said] += 1
    width = max(map(len, rows))
    yield f"{'right cause':{width}}  cases  right  said instead"
    for label, said in sorted(rows.items()):
        instead = ", ".join(f"{other} ({count})" for other, count in said.items() if other != label)
        yield f"{label:{width}}  {sum(said.values()):5}  {said[label]:5}  {instead}".rstrip()


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the counts and shares."""
    count = len(verdicts)
    right, fixed = sum(v.right for v in verdicts), sum(v.fix for v in verdicts)
    confident = sum(v.wrong_but_confident for v in verdicts)
    return {
        "cases": count,
        "right_cause": right,
        "right_cause_and_fix": fixed,
        "right_cause_and_fix_pct": round(100 * fixed / count, 1),
        "wrong_but_confident": confident,
        "wrong_but_confident_pct": round(100 * confident / count, 1),
        "slowest_s": round(max(v.seconds for v in verdicts), 2),
    }


def main() -> int:
    """Print the table, each case that is wrong, and the summary; 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[OWN])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    verdicts = [judge(case) for case in cases_in(options.folders)]
    if not verdicts:
        parser.error(f"no case.yaml below {', '.join(map(str, options.folders))}")
    print("\n".join(table(verdicts)))
    for verdict in verdicts:
        if not verdict.fix:
            what = "no such fix" if verdict.right else f"wanted {' or '.join(verdict.wanted)}"
            print(f"WRONG {verdict.name}: {what}; said {verdict.said} ({verdict.confidence})")
    figures = summary(verdicts)
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps({**figures, "verdicts": list(map(asdict, verdicts))}, indent=1) + "\n")
    return 0 if figures["right_cause_and_fix_pct"] >= 90 and figures["wrong_but_confident_pct"] <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
