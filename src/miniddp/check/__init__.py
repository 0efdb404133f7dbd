"""Is my data parallel training right? A command that watches a script.

    torchrun --nproc_per_node=2 -m miniddp.check train.py --its --options

Probes note what each rank does, `exchange` carries the notes to one rank, the
modules in `report.KINDS` read them, each for one kind of finding, and `report`
prints. To add a kind, copy one of these modules and name it there.

`verify_replicas` and `check_equal_steps` ask two of its questions from within
a script.
"""

from miniddp.replicate import verify_replicas
from miniddp.sampler import check_equal_steps

__all__ = ["check_equal_steps", "verify_replicas"]
