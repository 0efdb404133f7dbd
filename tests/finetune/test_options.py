import math
from dataclasses import FrozenInstanceError, asdict

import pytest

from finetune.options import Options, OptionsError, parse_options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model": "huge"}, "--model must be one of tiny, 5m, 25m, 135m, 360m, got 'huge'"),
        ({"ddp": "horovod"}, "--ddp must be one of simple, miniddp, torch, got 'horovod'"),
        ({"amp": "fp8"}, "--amp must be one of off, bf16, fp16, got 'fp8'"),
        ({"epochs": 0}, "--epochs must be at least 1 and below 2^31, got 0"),
        ({"steps": 0}, "--steps must be at least 1 and below 2^31, got 0"),
        ({"batch_size": -1}, "--batch-size must be at least 1 and below 2^31, got -1"),
        ({"accumulation": 0}, "--accumulation must be at least 1 and below 2^31, got 0"),
        ({"max_length": 0}, "--max-length must be at least 1 and below 2^31, got 0"),
        ({"max_length": 10**30}, f"--max-length must be at least 1 and below 2^31, got {10**30}"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be at least 1 and below 2^31, got 0"),
        ({"keep": 0}, "--keep must be at least 1 and below 2^31, got 0"),
        ({"timeout": 0}, "--timeout must be at least 1 and below 2^31, got 0"),
        ({"warmup": -1}, "--warmup must be at least 0 and below 2^31, got -1"),
        ({"seed": -1}, "--seed must be at least 0 and below 2^31, got -1"),
        ({"seed": 2**64}, f"--seed must be at least 0 and below 2^31, got {2**64}"),
        ({"lr": math.nan}, "--lr must be a positive number below 1e30, got nan"),
        ({"lr": math.inf}, "--lr must be a positive number below 1e30, got inf"),
        ({"lr": 1e39}, "--lr must be a positive number below 1e30, got 1e+39"),
        ({"clip": 0.0}, "--clip must be a positive number below 1e30, got 0.0"),
        ({"checkpoint": ""}, "--checkpoint must be something, got ''"),
        ({"backend": "gloom"}, "--backend must be one that this torch has, got 'gloom'"),
        ({"backend": "gpu:"}, "--backend must be one that this torch has, got 'gpu:'"),
        ({"accumulation": 3}, "--accumulation must divide --batch-size, got 3 for 16 pairs"),
        ({"checkpoint_every": 5}, "--checkpoint-every needs --checkpoint"),
        ({"resume": "auto"}, "--resume auto needs --checkpoint"),
    ],
)
def test_bad_values_are_refused_in_python_and_on_the_command_line(options, expected):
    with pytest.raises(OptionsError) as caught:
        Options(**options)
    assert str(caught.value) == expected
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with pytest.raises(OptionsError) as caught:
        parse_options(flags)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--epoch", "2"], "unrecognized arguments: --epoch 2"),
        (["--epochs", "two"], "argument --epochs: invalid int value: 'two'"),
        (["--data-dir"], "argument --data-dir: expected one argument"),
    ],
)
def test_unknown_flags_and_bad_types_are_refused(arguments, expected):
    with pytest.raises(OptionsError) as caught:
        parse_options(arguments)
    assert str(caught.value) == expected


def test_of_what_was_given_a_message_quotes_the_beginning_only():
    long = "x" * 5_000_000
    for arguments in ([f"--{long}"], ["--epochs", long], [f"--model={long}"]):
        with pytest.raises(OptionsError) as caught:
            parse_options(arguments)
        assert len(str(caught.value)) <= 200


def test_every_option_has_a_flag_and_options_cannot_be_changed():
    chosen = Options(
        *("here", "5m", False, 2, 3, 4, 2, "torch", "bf16", 0.5, 9, 1.5, 6, 7),
        *("saved", 10, 3, "auto", True, 60, "gloo", "traces"),
    )
    assert all(getattr(chosen, name) != value for name, value in asdict(Options()).items())
    arguments = ["--data-dir=here", "--model=5m", "--no-pretrained", "--epochs=2", "--steps=3"]
    arguments += ["--batch-size=4", "--accumulation=2", "--ddp=torch", "--amp=bf16", "--lr=0.5"]
    arguments += ["--warmup=9", "--clip=1.5"]
    arguments += ["--max-length=6", "--seed=7", "--checkpoint=saved", "--checkpoint-every=10"]
    arguments += ["--keep=3", "--resume=auto", "--elastic", "--timeout=60"]
    arguments += ["--backend=gloo", "--profile=traces"]
    assert parse_options(arguments) == chosen
    assert parse_options([]) == Options()
    with pytest.raises(FrozenInstanceError):
        chosen.lr = 1.0


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("(default: ") == len(asdict(Options()))


def test_help_is_shown_by_rank_0_alone(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        parse_options(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == ""
