"""The full speed report: greedy and sampled, short and long prompts, with and without the cheaper layouts of weights.

benchmark.py PAIR_RUN [--out DIR] [--texts 6] [--tokens 48] [--threads 1,2] [--minutes 60] [--stages …]
Every stage is one `hetspec bench` in a process of its own, which adds its finished runs to DIR; a second call goes on
where the first one stopped. Stages that no longer fit into the time are named and left out. The figures end in
DIR/report.json, DIR/report.md and MLflow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GREEDY = "none,slem:3,slem:5,slem:8,slem:auto,slrs:5,auto,hf-slem:3,hf-slem:5,hf-slem:8,hf-slem:default"
SAMPLED = "none,tli:3,slrs:3,slrs:5,slrs:5:token,slrs:auto,rdk:3,auto,hf-tli:3,hf-tli:5"


@dataclass(frozen=True)
class Stage:
    """One comparison.

    Attributes:
        name: of its files.
        algorithms, prompts: as `hetspec bench` takes them.
        options: its other options.
        tokens: new tokens of each text, 0 for the report's.
        texts: prompts of each kind, 0 for the report's.
    """

    name: str
    algorithms: str
    prompts: str = "code,prose,chat"
    options: tuple[str, ...] = field(default=())
    tokens: int = 0
    texts: int = 0


LEVERS = ("--draft-weights", "int4")
STAGES = (
    Stage("greedy", GREEDY),
    Stage(
        "greedy-levers",
        "none,slem:3,slem:5,slem:auto,auto,hf-slem:3,hf-slem:5,hf-slem:default",
        options=LEVERS,
    ),
    Stage("sampled", SAMPLED, options=("--temperature", "1")),
    Stage(
        "sampled-levers", "none,tli:3,slrs:3,slrs:5,slrs:auto,auto", options=("--temperature", "1", *LEVERS)
    ),
    Stage("long", "slem:3,slem:5,auto,hf-slem:3", prompts="long", tokens=32, texts=1),
)


def main() -> int:
    """Runs the stages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair")
    parser.add_argument("--out", type=Path, default=Path("artifacts/benchmark"))
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--screen", type=float, default=0.7)
    parser.add_argument("--stages", nargs="+", default=[s.name for s in STAGES])
    arguments = parser.parse_args()
    if unknown := set(arguments.stages) - {s.name for s in STAGES}:
        parser.error(
            f"unknown stages {', '.join(sorted(unknown))}; choose among {', '.join(s.name for s in STAGES)}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {}
    for threads in arguments.threads.split(","):
        for stage in STAGES:
            if stage.name not in arguments.stages:
                continue
            name = f"{stage.name}-{threads}t"
            left = ends - time.monotonic()
            try:
                found = run(stage, name, threads, arguments, left) if left > 60 else None
            except subprocess.TimeoutExpired:
                found = None
            if found is None:
                print(
                    f"{name}: left out, the time is over; the same command goes on with it", file=sys.stderr
                )
            elif isinstance(found, int):
                return found
            else:
                report[name] = found
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(table(name, stage) for name, stage in report.items())
    (arguments.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def run(stage: Stage, name: str, threads: str, arguments: argparse.Namespace, seconds: float) -> Any:
    """One stage: its JSON, or the exit code it failed with."""
    command = [sys.executable, "-c", "from hetspec.cli import main; main()", "bench"]
    command += ["--pair", arguments.pair, "--algorithms", stage.algorithms, "--prompts", stage.prompts]
    command += ["--texts", str(stage.texts or arguments.texts), "--screen", str(arguments.screen)]
    command += ["--max-new-tokens", str(stage.tokens or arguments.tokens), *stage.options]
    command += ["--clock", arguments.clock]
    command += ["--resume", str(arguments.out / f"{name}.jsonl"), "--json"]
    print(f"{name} …", file=sys.stderr)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        timeout=seconds,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.returncode


def table(name: str, stage: dict[str, Any]) -> str:
    """A stage as a Markdown table, a row for each contestant."""
    rows = stage["contestants"]
    kinds = list(dict.fromkeys(r["collection"] for r in rows))
    lines = [
        f"### {name}",
        "",
        f"drafter's weights {stage['draft_weights']}, target's {stage['target_weights']}; {stage['clock']} time",
        "",
        "| contestant | " + " | ".join(f"{kind} (n)" for kind in kinds) + " |",
        "|---" * (1 + len(kinds)) + "|",
    ]
    for contestant in dict.fromkeys(r["name"] for r in rows):
        cells = [contestant]
        for kind in kinds:
            mine = [r for r in rows if r["name"] == contestant and r["collection"] == kind]
            cells.append(_cell(mine[0]) if mine else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    ratio = row["ratio_to_plain"]
    same = "" if row["identical"] is None else f", {row['identical']} same"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f}; {row['prompts']}{same})"


if __name__ == "__main__":
    sys.exit(main())
