"""What a torchrun and its ranks say when a rank is lost, in short."""

import re
import subprocess
import textwrap

FRAME = re.compile(r"(\[rank\d\]: )?(Traceback| )|frame #|<omitting|Exception raised")
BEGIN = re.compile(r"(train|test) data|tokenizer|model \w+:|loss:")


def output_of(launcher: subprocess.Popen[str]) -> str:
    """All that a launcher, started by `programs.start_python`, and its ranks printed.

    Raises `RuntimeError` with it if the launcher fails, and `subprocess.TimeoutExpired`
    after five minutes.
    """
    printed, errors = launcher.communicate(timeout=300)
    if launcher.returncode:
        raise RuntimeError(f"a launcher failed:\n{printed}{errors}")
    return printed + errors


def in_short(output: str) -> str:
    """The lines that say what happened, 76 characters wide.

    No frames, no data, no dates, no ids of processes, no ports; and nothing of what
    `finetune` says of its data and model.
    """
    kept = []
    for line in output.splitlines():
        line = re.sub(r"^([WE])\d{4} \S+ \d+ \S*torch/distributed/", r"\1 ", line)
        line = re.sub(r"(?<=process )\d+", "…", line)
        line = re.sub(r" \(pid: \d+\).*", "", line)
        line = re.sub(r"\[/\S+ ", "", line)  # a file of C++, and its line
        line = re.sub(r"(?<=127\.0\.0\.1\]):\d+", "", line)
        line = re.sub(r" This is typically caused.*", "", line)
        if line.strip() and not FRAME.match(line) and not BEGIN.match(line):
            kept.append(textwrap.fill(line, 76, subsequent_indent="    "))
    return "\n".join(kept)
