import os
import socket
import threading
from pathlib import Path

import pytest

from instruments import programs
from miniddp import run_ranks
from miniddp.launch import RanksFailed

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_gets_its_variables_and_one_thread_but_not_a_launchers(monkeypatch):
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("RANK", "3")
    names = ("KEPT", "GIVEN", "OMP_NUM_THREADS", "RANK")
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    assert programs.run_python("-c", code, GIVEN="too") == "yes too 1 None\n"
    assert programs.run_python("-c", code, RANK="0") == "yes None 1 0\n"
    assert "GIVEN" not in os.environ


def test_a_program_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"(?s)failed:.*ZeroDivisionError"):
        programs.run_python("-c", "1 / 0")


def test_launchers_start_at_once_and_the_ranks_stand_in_order():
    port = programs.free_port()
    meeting = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=test"]
    node = ["--nnodes=2", "--nproc_per_node=1", *meeting, str(ROOT / "runs/hello.py")]
    assert programs.run_launchers(node, node) == [
        "rank 0 of 2: I gave 1, our sum is 3\n",
        "rank 1 of 2: I gave 2, our sum is 3\n",
    ]


def test_a_launcher_that_fails_says_why(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text("raise ValueError('no label')")
    with pytest.raises(RuntimeError, match="a launcher failed"):
        programs.run_launchers(["--standalone", "--nproc_per_node=1", str(program)])


def test_a_free_port_can_be_listened_at_and_the_listener_is_noticed():
    port = programs.free_port()
    waiting = threading.Thread(target=programs.wait_for_listener, args=(port,), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(30)
    assert not waiting.is_alive()


def test_losses_are_read_from_what_a_stage_prints():
    text = "off by 3e-08 at most\nstep  20  loss 5.5000\nstep 183  loss 4.25\nheld-out loss 4.75\n"
    assert programs.step_losses(text) == {20: 5.5, 183: 4.25}
    assert programs.held_out_loss(text) == 4.75
    with pytest.raises(ValueError, match="no held-out loss"):
        programs.held_out_loss("step 20  loss 5.5")


def test_a_stage_runs_in_a_group_that_is_there_with_a_line_replaced(monkeypatch):
    monkeypatch.chdir(ROOT)
    seed = "torch.manual_seed(0)"
    call = (programs.run_edited_stage, 2, "3_sharding.py", seed)
    printed = [run_ranks(*call, new, 1, timeout=300).outputs[0] for new in (seed, "torch.seed()")]
    losses = [programs.step_losses(text) for text in printed]
    assert [list(found) for found in losses] == [[1], [1]]
    assert losses[0] != losses[1]
    with pytest.raises(RanksFailed, match=r"3_sharding\.py has 0 times 'nothing', expected once"):
        run_ranks(programs.run_edited_stage, 1, "3_sharding.py", "nothing", "", 1)
