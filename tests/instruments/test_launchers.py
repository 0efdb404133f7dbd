import subprocess

import pytest

from instruments.launchers import in_short, output_of
from instruments.programs import start_python

ACCIDENT = """\
train data: 384 pairs of MRPC, its original split
model tiny: 590,880 parameters
W0731 10:02:11.123456 4711 /opt/site-packages/torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 815 closing signal SIGTERM
E0731 10:02:12.123456 4711 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 816) of binary: /usr/bin/python
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ranks/train.py", line 1, in <module>
Traceback (most recent call last):
  File "/home/ranks/train.py", line 1, in <module>
RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29056. This is typically caused by a remote worker crashing.

resumed after step 10 from disturbed/step-00000010.safetensors
"""  # noqa: E501


def test_what_happened_is_left():
    assert in_short(ACCIDENT).splitlines() == [
        "W elastic/multiprocessing/api.py:1028] Sending process … closing signal",
        "    SIGTERM",
        "E elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1",
        "RuntimeError: Connection closed by peer [127.0.0.1].",
        "resumed after step 10 from disturbed/step-00000010.safetensors",
    ]


def program(code: str) -> subprocess.Popen[str]:
    return start_python("-c", code)


def test_an_output_holds_both_streams():
    said = output_of(program("import sys; print('one'); print('two', file=sys.stderr)"))
    assert sorted(said.splitlines()) == ["one", "two"]


def test_a_launcher_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)a launcher failed:.*no label"):
        output_of(program("raise ValueError('no label')"))
