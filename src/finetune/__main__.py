"""`python -m finetune`, or `torchrun … -m finetune`: the trainer as a command."""

from finetune import job
from finetune.train import main

job.run(main)
