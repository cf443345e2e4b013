"""Tests of the way from an export to a trained adapter, with a model of two layers and random weights.

`make test-train`: the environment of deploy/train/requirements.txt is made under `.clients/train` at the first run
(about 1.5 GB with a CPU build of torch: set PIP_EXTRA_INDEX_URL to an index that has one, else the build for GPUs
comes). The code of `local2 export` writes the rows. The commands of docs/training.md run unchanged except for the
model. A longer training must make held-out preferred answers likelier, and more so than the others. The trial of the
batch uses a stand-in for the memory of a GPU. The status is 1 when a check fails.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT)]

from services.reward.export import Filters, dpo_rows, kto_rows  # noqa: E402

PLACE = ROOT / ".clients" / "train"
TRAIN = ROOT / "deploy" / "train"
FILTERS = Filters(consent=True, test_share=0.25)
THINGS = ("lamp", "river", "engine", "garden", "clock", "bridge", "piano", "kettle", "ladder", "window")
PLACES = ("kitchen", "harbour", "station", "library", "workshop", "valley", "market", "tower")


def prepare() -> Path:
    """The Python of the trainer's environment."""
    python = PLACE / "bin" / "python"
    stamp = PLACE / ".ready"
    wanted = (TRAIN / "requirements.txt").read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print("Making the environment of the trainer under .clients/train (minutes at the first time)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(TRAIN / "requirements.txt")]
        if "LOCAL2_TORCH" in os.environ:
            command.append(f"torch=={os.environ['LOCAL2_TORCH']}")
        subprocess.run(command, check=True)
        stamp.write_text(wanted)
    return python


def answers(seed: int, count: int = 96) -> Iterator[dict[str, Any]]:
    """Pairs as the store of preferences gives them: the better answer is short and names its source."""
    chance = random.Random(seed)
    for number in range(count):
        thing, place = chance.choice(THINGS), chance.choice(PLACES)
        asked = [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": f"Where is the {thing} number {number}?"},
        ]
        # every third was looked up; arguments of different tools are of different types
        call = (
            {"name": "look_up", "arguments": {"thing": thing}} if number % 2 else {"name": "at", "arguments": {"n": 1}}
        )
        looked_up = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "name": call["name"], "content": f"the {place}"},
        ]  # fmt: skip
        calls = json.dumps(looked_up) if number % 3 == 0 else ""
        good = f"The {thing} is in the {place}. Source: list of the {place}."
        bad = f"Well, who knows, perhaps somewhere, the {thing} could be anywhere, maybe the {place}, maybe not."
        consents = "ann" if number % 8 else "bob"
        whole = {
            "query_id": f"{number}-0", "session_id": f"s{number // 2}", "user_id": consents, "intent": "question",
            "time": number, "config": "{}", "messages": json.dumps(asked), "tools": int(bool(calls)),
            "calls": calls, "material": 0, "judges": "",
        }  # fmt: skip
        a_wins = chance.random() < 0.5
        yield {
            "winner": "A" if a_wins else "B", "score_a": 5 if a_wins else 2, "score_b": 2 if a_wins else 5,
            "vote_a": None, "vote_b": None, "judges": "",
            "a": {**whole, "response_id": f"{number}-0:A", "answer": good if a_wins else bad},
            "b": {**whole, "response_id": f"{number}-0:B", "answer": bad if a_wins else good},
        }  # fmt: skip


def rows(method: str) -> list[dict[str, Any]]:
    consents = {"ann": True, "bob": False}
    pairs = list(answers(seed=7))
    if method == "dpo":
        return list(dpo_rows(pairs, consents, FILTERS))
    graded = [
        {**pair[side], "score": pair[f"score_{side}"], "vote": None} for pair in pairs for side in ("a", "b")
    ]  # fmt: skip
    return list(kto_rows(graded, consents, FILTERS))


def prepared(python: Path, folder: Path, method: str) -> tuple[Path, Path]:
    """Write the rows of a method and a model for their words; return the paths."""
    data, model = folder / f"{method}.jsonl", folder / f"{method}-model"
    written = rows(method)
    assert not any(row["provenance"]["query_id"] == "0-0" for row in written), "a row without consent"
    data.write_text("".join(json.dumps(row) + "\n" for row in written))
    subprocess.run([python, HERE / "tiny.py", data, model], check=True)
    return data, model


def documented(method: str) -> list[str]:
    """Return the words of the command for a method in docs/training.md."""
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^train/bin/python deploy/train/train.py {method} .*$", page, re.MULTILINE)
    return shlex.split(line)


def as_documented(python: Path, folder: Path, method: str) -> list[str]:
    """Return the failures of the documented command, with the file, the model and the folder of this test."""
    data, model = folder / f"{method}.jsonl", folder / f"{method}-model"
    words = documented(method)
    places = {words[0]: python, words[3]: data, words[words.index("--model") + 1]: model}
    places[words[words.index("--out") + 1]] = folder / f"{method}-documented"
    command = [str(places.get(word, word)) for word in words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        return [f"{method} as documented: status {done.returncode}, {done.stderr[-600:]}"]
    wanted = ("rows at once: 16; in a step: 16", " rows per second, 0:00 left", "better answer is the likelier one")
    wrong = [f"{method} as documented: no line with {text!r}" for text in wanted if text not in done.stdout]
    settings = json.loads((folder / f"{method}-documented" / "report.json").read_text())["settings"]
    if (settings["batch"], settings["accumulate"], settings["checkpointing"]) != (16, 1, False):
        wrong.append(f"{method} as documented: a model of two layers is trained with {settings}")
    return wrong


def trained(python: Path, folder: Path, method: str) -> list[str]:
    """Return the failures of a training by one method."""
    out = folder / method
    data, model = prepared(python, folder, method)
    command = [python, TRAIN / "train.py", method, data, "--model", model, "--out", out]
    settings = ["--epochs", "6", "--batch", "8", "--accumulate", "1", "--learning-rate", "1e-2", "--max-length", "256"]
    subprocess.run([*command, *settings], check=True)
    report = json.loads((out / "report.json").read_text())
    before, after = report["log_probability"]["before"], report["log_probability"]["after"]
    share = report["accuracy"]
    print(f"{method}: {report['rows']}  {report['pairs']} pairs  before {before}  after {after}  accuracy {share}")
    wrong = []
    if not after["good"] > before["good"]:
        wrong.append(f"{method}: held-out preferred answers became less likely")
    if not after["good"] - after["bad"] > before["good"] - before["bad"]:
        wrong.append(f"{method}: they are no further from the others")
    # Random weights may prefer the better answers from the beginning.
    if share["after"] < max(0.9, share["before"]):
        wrong.append(f"{method}: of the held-out pairs {share} have the better answer as the likelier one")
    if not (out / "adapter" / "adapter_model.safetensors").is_file():
        wrong.append(f"{method}: there is no adapter")
    return wrong


def batch_by_trial(python: Path, folder: Path, method: str) -> list[str]:
    """Return the failures of the trial on a device with room for one row, or for five with checkpointing."""
    command = [python, HERE / "trial.py", folder / f"{method}.jsonl", folder / f"{method}-model", method]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"{method}: the trial has status {done.returncode}, {done.stderr[-600:]}"]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{method}: by trial {found}")
    wanted = [1, 16, False] if method == "dpo" else [4, 4, True]
    return [] if found["plan"] == wanted else [f"{method}: by trial {found}, not {wanted}"]


def refused(python: Path, folder: Path) -> list[str]:
    """What is not said of rows that cannot be trained on."""
    none = folder / "none.jsonl"
    none.write_text("")
    all_train = folder / "all-train.jsonl"
    all_train.write_text("".join(json.dumps({**row, "split": "train"}) + "\n" for row in rows("dpo")))
    wrong = []
    broken = folder / "broken.jsonl"
    broken.write_text("no JSON\n")
    for data, method, sentence in (
        (broken, "dpo", "is no file of JSON lines"),
        (none, "dpo", "has no rows"),
        (folder / "dpo.jsonl", "kto", "is it an export of kto?"),
        (all_train, "dpo", "--test-share"),
        (folder / "kto.jsonl", "kto --batch 1", "kto needs at least 2 rows at once"),
    ):
        method, *more = method.split()
        command = [python, TRAIN / "train.py", method, data, "--model", folder / "dpo-model", "--out", folder / "no"]
        command += more
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 1 or sentence not in done.stderr or "Traceback" in done.stderr:
            wrong.append(f"{data.name} for {method}: status {done.returncode}, {done.stderr[-300:]}")
    return wrong


def main() -> int:
    python = prepare()
    os.environ.update(
        HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wrong = []
        for method in ("dpo", "kto"):
            for part in (trained, as_documented, batch_by_trial):
                wrong += part(python, folder, method)
        wrong += refused(python, folder)
    for one in wrong:
        print(f"FAILED {one}")
    print("test-train: " + (f"{len(wrong)} failed" if wrong else "all held"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
