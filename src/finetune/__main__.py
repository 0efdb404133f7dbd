"""`python -m finetune`, or `torchrun … -m finetune`: the trainer as a command."""

from finetune.parent import end_with_torchrun

if __name__ == "__main__":
    end_with_torchrun()  # also while torch is imported

from finetune import last_words
from finetune.requirement import torch_problem


def main() -> int:
    problem = torch_problem()
    if problem:
        last_words.say(f"finetune: error: {problem}")
        return 1
    from finetune import train  # which an older torch may not be able to import

    return train.main()


last_words.run(main)
