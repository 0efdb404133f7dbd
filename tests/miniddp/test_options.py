import math
from dataclasses import FrozenInstanceError, asdict

import pytest

from miniddp.command_line import parse_options
from miniddp.options import Options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "huge"}, "model must be one of tiny, 5m, 25m, 135m, 360m, got 'huge'"),
        ({"ddp": "horovod"}, "ddp must be one of simple, miniddp, torch, got 'horovod'"),
        ({"amp": "fp8"}, "amp must be one of off, bf16, fp16, got 'fp8'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1, got -1"),
        ({"accumulation": 0}, "accumulation must be at least 1, got 0"),
        ({"base_batch_size": 0}, "base_batch_size must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1, got 0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"lr": math.nan}, "lr must be a positive number, got nan"),
        ({"lr": math.inf}, "lr must be a positive number, got inf"),
        ({"clip": 0.0}, "clip must be a positive number, got 0.0"),
        (
            {"accumulation": 3},
            "accumulation must divide batch_size, got 3 micro-batches for 16 pairs",
        ),
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint, the folder for checkpoints"),
        ({"resume": "auto"}, "resume auto needs checkpoint, the folder for checkpoints"),
    ],
)
def test_bad_values_are_refused_by_the_dataclass_and_in_one_line_by_the_program(
    capsys, options, expected
):
    with pytest.raises(ValueError, match=expected):
        Options(**options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with pytest.raises(SystemExit) as ended:
        parse_options(Options, "miniddp.train", "", flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"miniddp.train: error: {expected}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epoch", "2"], "unrecognized arguments: --epoch 2"),
        (["--epochs", "two"], "argument --epochs: invalid int value: 'two'"),
        (["--data-dir"], "argument --data-dir: expected one argument"),
    ],
)
def test_unknown_flags_and_bad_types_end_in_one_line(capsys, arguments, expected):
    with pytest.raises(SystemExit) as ended:
        parse_options(Options, "miniddp.train", "", arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"miniddp.train: error: {expected}\n"


def test_every_option_has_a_flag_and_options_cannot_be_changed():
    chosen = Options(
        *("here", "5m", False, 2, 3, 4, 2, "torch", "bf16", 0.5, True, 8, 9, 1.5, 6, 7),
        *("saved", 10, "auto", "traces", "curves"),
    )
    assert all(getattr(chosen, name) != value for name, value in asdict(Options()).items())
    arguments = ["--data-dir=here", "--model=5m", "--no-pretrained", "--epochs=2", "--steps=3"]
    arguments += ["--batch-size=4", "--accumulation=2", "--ddp=torch", "--amp=bf16", "--lr=0.5"]
    arguments += ["--scale-lr", "--base-batch-size=8", "--warmup=9", "--clip=1.5"]
    arguments += ["--max-length=6", "--seed=7", "--checkpoint=saved", "--checkpoint-every=10"]
    arguments += ["--resume=auto", "--profile=traces", "--tensorboard=curves"]
    assert parse_options(Options, "miniddp.train", "", arguments) == chosen
    assert parse_options(Options, "miniddp.train", "", []) == Options()
    with pytest.raises(FrozenInstanceError):
        chosen.lr = 1.0


@pytest.mark.parametrize(
    "options",
    [{"ddp": "torch"}, {"amp": "bf16"}, {"accumulation": 2}, {"clip": 1.0}, {"profile": "traces"}],
)
def test_a_plain_step_is_one_to_which_nothing_is_added(options):
    assert Options(warmup=3, checkpoint="saved", tensorboard="curves").plain
    assert not Options(**options).plain


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(Options, "miniddp.train", "", ["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("(default: ") == len(asdict(Options()))
