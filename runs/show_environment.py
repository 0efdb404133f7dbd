"""What torchrun tells a process: `torchrun --nproc_per_node=2 runs/show_environment.py`."""

import os

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def main() -> None:
    lines = [f"{name}={os.environ.get(name, 'not set')}\n" for name in NAMES]
    print("".join(lines), end="")  # in one piece: ranks share the screen


if __name__ == "__main__":
    main()
