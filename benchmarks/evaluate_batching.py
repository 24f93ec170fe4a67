"""Questions per second of the transformers engine on a processor: batches against one by one, two replicas against one.

python benchmarks/evaluate_batching.py            # writes benchmarks/results/evaluate_batching.json; minutes
python benchmarks/evaluate_batching.py --quick    # one round, writes nothing

A model of 21 million random weights answers questions of ORAN-Bench-13K from tests/data, every process on one thread,
so that two replicas have what one has twice. What is compared takes turns within a round, and its answers must be the
same. Long prompts carry two passages of 100 words each: what is read costs a processor the same in any batch, so that
batching gains less there. Beside the clock's seconds stand the processor's own, which other programs lengthen little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "evaluate_batching.json"
DIMENSIONS = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
VOCABULARY = 2000
ROUNDS = 3
BATCH = 16
NEW_TOKENS = 64
"""The longest answer that `trainwright eval` asks for of its own accord; random weights seldom end one sooner."""
QUESTIONS = 32


def main(arguments: list[str]) -> None:
    """Measure, print, and write the result."""
    if arguments[:1] == ["--replica"]:
        return replica(Path(arguments[1]), Path(arguments[2]))
    rounds = 1 if "--quick" in arguments else ROUNDS
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_model(folder / "model")
        short, long = prompts(passages=False), prompts(passages=True)
        result = {
            "schema_version": 1,
            "kind": "measured",
            "model": {"family": "qwen2", "parameters": parameters, **DIMENSIONS, "vocab_size": VOCABULARY},
            "questions": len(short),
            "new_tokens": NEW_TOKENS,
            "rounds": rounds,
            "threads_per_process": 1,
            "cores": os.cpu_count(),
            "versions": versions(),
            "load_average_before": load_before,
            "batched_against_one_by_one": batched(folder / "model", short, rounds),
            "batched_against_one_by_one_with_passages": batched(folder / "model", long[:BATCH], 1),
            "questions_per_cpu_s_by_batch_size": batch_sizes(folder / "model", short),
            "two_replicas_against_one": replicas(folder, short, rounds),
            "load_average_after": os.getloadavg(),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if "--quick" not in arguments:
        RESULT.write_text(text + "\n", encoding="utf-8")
    return None


def make_model(folder: Path) -> int:
    """Write a random model with a tokenizer of the questions' own words, and return its number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    byte_level.train_from_iterator(prompts(passages=False), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", vocab_size=VOCABULARY, eos_token_id=1, pad_token_id=0, **DIMENSIONS)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def prompts(*, passages: bool) -> list[str]:
    """Return the prompts that `trainwright eval` would put, the passages made of other questions' words."""
    from trainwright.evaluate.prompts import reasoning_prompt
    from trainwright.evaluate.questions.question_files import read_questions
    from trainwright.evaluate.retrieval.passages import Passage

    questions = read_questions(ROOT / "tests" / "data" / "oran_bench").questions[:QUESTIONS]
    words = " ".join(question.text for question in questions).split()
    given = [
        [
            Passage(str(start), "o-ran", " ".join(words[start : start + 100]), f"o-ran.txt#{start}")
            for start in (number * 7 % 300, number * 11 % 400)
        ]
        for number in range(len(questions))
    ]
    return [reasoning_prompt(question, given[n] if passages else ()) for n, question in enumerate(questions)]


def batched(model: Path, asked: list[str], rounds: int) -> dict[str, Any]:
    """Compare batches of 16 with one prompt at a time, in turns, and check that the answers are the same."""
    sixteen, one = engine(model, BATCH), engine(model, 1)
    batches: list[Timed] = []
    singles: list[Timed] = []
    for number in range(rounds):
        # Who begins changes, so that neither always has the quieter moment.
        if number % 2:
            batches.append(timed(sixteen, asked))
            singles.append(timed(one, asked))
        else:
            singles.append(timed(one, asked))
            batches.append(timed(sixteen, asked))
        assert batches[-1].texts == singles[-1].texts, "batches change answers"
    return {
        "batch": BATCH,
        "prompt_tokens_mean": batches[0].prompt_tokens_mean,
        "answers_compared": len(asked) * rounds,
        "answers_different": 0,
        "batched_questions_per_s": round(len(asked) / median(run.clock_s for run in batches), 2),
        "one_by_one_questions_per_s": round(len(asked) / median(run.clock_s for run in singles), 2),
        **ratios("ratio", [one.clock_s / batch.clock_s for one, batch in zip(singles, batches, strict=True)]),
        **ratios("ratio_of_cpu_s", [one.cpu_s / batch.cpu_s for one, batch in zip(singles, batches, strict=True)]),
    }


def ratios(name: str, of_pairs: list[float]) -> dict[str, Any]:
    """Return the median, and the ratio of each pair."""
    return {name: round(median(of_pairs), 2), f"{name}_of_each_pair": [round(ratio, 2) for ratio in of_pairs]}


def batch_sizes(model: Path, asked: list[str]) -> dict[str, float]:
    """Return questions per processor-second by batch size, and of transformers' continuous batches."""
    from trainwright.evaluate.engines.transformers_engine import TransformersEngine

    engines: dict[str, TransformersEngine] = {str(size): engine(model, size) for size in (8, 16, 32)}
    seconds = {name: timed(which, asked).cpu_s for name, which in engines.items()}
    seconds["continuous"] = continuous_cpu_s(engines["16"], asked)
    return {name: round(len(asked) / took, 2) for name, took in seconds.items()}


def continuous_cpu_s(which: Any, asked: list[str]) -> float:
    """Time transformers' continuous batches, which the engine itself takes on a GPU alone."""
    from trainwright.evaluate.engines.continuous import generate_continuously

    started = time.process_time()
    encoded = which._encoder.encode(asked, NEW_TOKENS)
    found = generate_continuously(
        which._model, encoded, which._generation(NEW_TOKENS), num_blocks=2 * BATCH, max_batch_tokens=256
    )
    assert found is not None
    return time.process_time() - started


def replicas(folder: Path, asked: list[str], rounds: int) -> dict[str, Any]:
    """Compare one process that answers all with two that answer half each; loading is not timed."""
    pairs = []
    for _ in range(rounds):
        pairs.append((answered_by(1, folder, asked), answered_by(2, folder, asked)))
    return {
        "one_replica_questions_per_s": round(len(asked) / median(one for one, _ in pairs), 2),
        "two_replicas_questions_per_s": round(len(asked) / median(two for _, two in pairs), 2),
        **ratios("ratio", [one_s / two_s for one_s, two_s in pairs]),
    }


def answered_by(count: int, folder: Path, asked: list[str]) -> float:
    """Return the seconds from the word to begin until the last of `count` processes is done."""
    workers = []
    for number in range(count):
        share = folder / f"share-{count}-{number}.json"
        share.write_text(json.dumps(asked[number::count]), encoding="utf-8")
        command = [sys.executable, __file__, "--replica", str(folder / "model"), str(share)]
        workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    started = time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("begin\n")
        worker.stdin.flush()
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == "done\n"
    took = time.perf_counter() - started
    for worker in workers:
        worker.communicate()
    return took


def replica(model: Path, share: Path) -> None:
    """Be one replica: load, wait for the word, answer."""
    asked = json.loads(share.read_text(encoding="utf-8"))
    which = engine(model, BATCH)
    print("ready", flush=True)
    sys.stdin.readline()
    which.generate(asked, max_new_tokens=NEW_TOKENS)
    print("done", flush=True)


def engine(model: Path, batch_size: int) -> Any:
    """Open the engine on the processor."""
    from trainwright.evaluate.engines.engine import EngineSettings
    from trainwright.evaluate.engines.opening import open_engine

    opened = open_engine(EngineSettings(model=str(model), devices="cpu", batch_size=batch_size))
    opened.generate(["a first prompt, which warms up"], max_new_tokens=2)
    return opened


@dataclass(frozen=True)
class Timed:
    """What all prompts took, on the clock and of the processor, and the answers."""

    clock_s: float
    cpu_s: float
    texts: list[str]
    prompt_tokens_mean: float


def timed(which: Any, asked: list[str]) -> Timed:
    """Answer all prompts."""
    clock, cpu = time.perf_counter(), time.process_time()
    answers = which.generate(asked, max_new_tokens=NEW_TOKENS)
    clock_s, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
    mean = sum(answer.prompt_tokens for answer in answers) / len(answers)
    return Timed(clock_s, cpu_s, [answer.text for answer in answers], round(mean, 1))


def versions() -> dict[str, str]:
    """Return what was measured with."""
    from importlib.metadata import version

    return {"python": sys.version.split()[0], "torch": version("torch"), "transformers": version("transformers")}


if __name__ == "__main__":
    main(sys.argv[1:])
